"""Hosts of tests that have files of their own, or say so."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ownloop_hosts.run_files import HostFiles


class OtherHost:
    """A host whose files are below a folder of this one."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.asked: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.fails_at = ""  # the name of a question

    async def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        self.asked.append(question.__name__)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if question.__name__ == self.fails_at:
            raise ConnectionError(f"host {self.name} is lost")
        return question(*(self.below(arg) if isinstance(arg, Path) else arg for arg in args))

    def below(self, path: Path) -> Path:
        """Where this host has a path."""
        return self.root / path.relative_to("/")


class ForgetfulHost(OtherHost):
    """This host, whose folders seem to be others than the controller's."""

    def __init__(self) -> None:
        """Its name is h1."""
        super().__init__("h1", Path("/"))

    async def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        is_token = isinstance(args[0], Path) and args[0].suffix == ".token"
        return False if is_token else await super().ask(question, *args)


def files_of(*hosts: OtherHost) -> HostFiles:
    """The files of a mesh with one rank on each of these hosts."""
    return HostFiles(hosts, len(hosts))
