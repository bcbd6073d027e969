"""An actor that does what a test of processes needs. In a module of its own: the processes import it."""

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from datetime import timedelta

from monarch.actor import Actor, concurrent_endpoint, endpoint


class TwoPartError(Exception):
    """Cannot be unpickled: that calls it with one argument."""

    def __init__(self, first: str, second: str) -> None:
        """Its text is both parts."""
        super().__init__(f"{first} and {second}")


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
    async def exit(self, status: int) -> None:
        """Raises SystemExit."""
        sys.exit(status)

    @endpoint
    async def complain_in_two_parts(self) -> None:
        """Raises an error that cannot be sent."""
        raise TwoPartError("this", "that")

    @endpoint
    async def echo(self, value: object) -> object:
        """Raises an exception that it is given, and returns anything else."""
        if isinstance(value, Exception):
            raise value
        return value

    @endpoint
    async def lock(self) -> threading.Lock:
        """Returns what cannot be sent."""
        return threading.Lock()

    @concurrent_endpoint
    async def doze(self, seconds: float) -> float:
        """Returns `seconds` after that time, and holds up no other call."""
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def hang(self, seconds: float) -> None:
        """Says so in its log, and blocks the process."""
        print(f"hangs for {seconds:g} s", flush=True)
        time.sleep(seconds)

    @endpoint
    async def freeze(self, stopped: int) -> None:
        """Stops the process of one rank with SIGSTOP. All ranks hang, this one if somebody continues it."""
        if os.environ["RANK"] == str(stopped):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    @endpoint
    async def reduce(self, raising: tuple[int, ...], agreed: bool) -> float:
        """The sum of the ranks' numbers. Ranks in `raising` give up before it; if `agreed`, all ranks do after it."""
        import torch  # seconds, which the other tests do not need
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        number, error = torch.tensor(float(dist.get_rank())), OSError(errno.ENOSPC, "no space left on the toy")
        if dist.get_rank() in raising and not agreed:
            raise error
        dist.all_reduce(number)
        if agreed:
            raise error
        return float(number)

    @endpoint
    async def leave(self, leaving: int) -> None:
        """Has one rank die in a collective. The others raise gloo's error, long before the death is known."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == leaving:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

    @endpoint
    async def die(self) -> None:
        """Ends the process the hard way."""
        os.kill(os.getpid(), signal.SIGKILL)
