"""An actor that does what a test of processes needs. In a module of its own: the processes import it."""

import os
import time

from monarch.actor import Actor, endpoint


class Toy(Actor):
    """Adds, complains, hangs and dies on demand."""

    def __init__(self, base: int) -> None:
        """`base` is added to everything."""
        self._base = base
        print(
            f"toy rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} says {os.environ['TOY_GREETING']}", flush=True
        )

    @endpoint
    async def add(self, value: int) -> int:
        """`base + value`."""
        return self._base + value

    @endpoint
    async def complain(self, value: int) -> None:
        """Raises the caller's mistake."""
        raise ValueError(f"value is {value}; it must be even")

    @endpoint
    async def hang(self, seconds: float) -> None:
        """Blocks the process."""
        time.sleep(seconds)

    @endpoint
    async def die(self) -> None:
        """Ends the process the hard way."""
        os.kill(os.getpid(), 9)
