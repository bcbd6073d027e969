"""Tries to run a program on a worker, with Monarch alone.

    python -m plugins.hosts.tests.stranger TRANSPORT WORKER FILE

It touches FILE on the worker's host if it may, and prints what happened.
"""

import asyncio
import sys
from pathlib import Path

from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint


class Intruder(Actor):
    """Runs where it is not wanted."""

    @endpoint
    async def touch(self, file: Path) -> None:
        """Proves it."""
        file.touch()


async def main(transport: str, worker: str, file: Path) -> None:
    """Attaches, and touches the file."""
    enable_transport(transport)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[worker], name="hosts")
    await hosts.initialized
    await hosts.spawn_procs(per_host={"gpus": 1}).spawn("intruder", Intruder).touch.call_one(file)


if __name__ == "__main__":
    try:
        asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])), 20))
        print("it ran")
    except Exception as error:
        print("refused", type(error).__name__, error)
