"""Where the ranks of a mesh write what belongs into a folder of the controller, and where they read it.

Every trainer rank writes its own shards, on its own host. Where all of these hosts have the controller's folder, on a
shared filesystem, they write there. Otherwise each writes beside the path of the same name on its host, the controller
collects the files, and the checkpoint appears when all of them have arrived. What ranks are to read is sent to the
hosts that lack it, and removed afterwards.

A folder is tried with a token before anything is written: the controller makes a file, and every host looks for it.
"""

import asyncio
import shutil
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from controller.processes.place import RunFiles
from ownloop_hosts import files
from ownloop_hosts.files import OtherHost, Progress

_POLL_S = 0.2
_HOSTS_AT_ONCE = 8  # each has 16 MiB under way


class HostFiles(RunFiles):
    """The files of one mesh."""

    def __init__(self, hosts: Sequence[OtherHost], num_ranks: int) -> None:
        """Each of the `hosts` has as many ranks."""
        super().__init__(num_ranks)
        self._hosts = hosts
        self._apart: dict[Path, Sequence[OtherHost]] = {}  # by folder, the hosts that do not have it
        self._collected: dict[Path, Path] = {}  # where ranks write what is to be collected to a path
        self._has_said_so = False

    async def to_write(self, path: Path) -> Path:
        """A path beside it where a host does not have the controller's folder. See `RunFiles`."""
        path = Path(path).absolute()
        if not (apart := await self._hosts_apart(path.parent)):
            return path
        from trainer.engines.pytorch import checkpoint  # loads torch

        if not self._has_said_so:
            self._has_said_so = True
            names = ", ".join(host.name for host in apart)
            print(f"{path.parent} is not shared with {names}; the controller collects what they write", flush=True)
        checkpoint.begin(path, 0)
        # No later attempt may have the same one: the agent of a lost host removes what was not collected.
        there = self._collected[path] = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        for host in self._hosts:
            try:
                await host.ask(files.make_room, there)
            except ValueError as error:
                raise ValueError(f"on host {host.name}: {error}") from None
        return there

    async def collect(self, path: Path, keep_last: int | None = None) -> None:
        """Fetches the files of every host. See `RunFiles`."""
        path = Path(path).absolute()
        if (staging := self._collected.pop(path, None)) is None:
            return
        from trainer.engines.pytorch import checkpoint  # loads torch

        target = files.hidden(path)
        while not await self._hosts[0].ask(files.has, staging):  # the first rank renames it when all have written
            await asyncio.sleep(_POLL_S)
        found = await self._found(staging)
        if (num_bytes := sum(found.values())) > shutil.disk_usage(target).free:
            raise OSError(f"{path} needs {num_bytes / 1e9:.2f} GB; there is less room than that")
        progress = Progress(f"collecting {path}", num_bytes)
        of_host: dict[str, list[tuple[Path, str, int]]] = {}
        for (host, folder, name), size in found.items():
            of_host.setdefault(host, []).append((folder, name, size))

        async def from_host(host: OtherHost) -> None:
            for folder, name, size in of_host.get(host.name, ()):
                await files.fetch(host, folder / name, target / name, size, progress)

        await _for_each(self._hosts, from_host)
        await asyncio.to_thread(checkpoint.complete_collected, path)
        await asyncio.gather(*(host.ask(files.remove, staging) for host in self._hosts))
        if keep_last is not None:
            await asyncio.to_thread(checkpoint.keep_newest, path, keep_last)

    async def _found(self, staging: Path) -> dict[tuple[str, Path, str], int]:
        """Host, folder and name of every file that was written, each once, with its size."""
        found: dict[tuple[str, Path, str], int] = {}
        for folder in (staging, files.hidden(staging)):  # only the first host has renamed it
            for host in self._hosts:
                known = {name for _, _, name in found}  # hosts may share a filesystem among themselves
                sizes = await host.ask(files.sizes_below, folder)
                found |= {(host.name, folder, name): size for name, size in sizes.items() if name not in known}
        return found

    @asynccontextmanager
    async def to_read(self, path: Path) -> AsyncGenerator[Sequence[Path]]:
        """Sends the files to the hosts that lack them. See `RunFiles`."""
        path = Path(path).absolute()
        apart = await self._hosts_apart(path.parent) if path.is_dir() else ()
        sent = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        per_host = self.num_ranks // len(self._hosts)
        try:
            if apart:
                await self._send(path, sent, apart)
            yield [sent if self._hosts[rank // per_host] in apart else path for rank in range(self.num_ranks)]
        finally:
            with suppress(Exception):  # the agent of a host that is lost removes the folder itself
                await asyncio.gather(*(host.ask(files.remove, sent) for host in apart))

    async def _send(self, path: Path, sent: Path, hosts: Sequence[OtherHost]) -> None:
        sizes = files.sizes_below(path)
        names = ", ".join(host.name for host in hosts)
        progress = Progress(f"sending {path} to {names}", sum(sizes.values()) * len(hosts))

        async def to_host(host: OtherHost) -> None:
            await host.ask(files.make_room, sent)
            for name in sizes:
                await files.send(host, path / name, sent / name, progress)

        await _for_each(hosts, to_host)

    async def _hosts_apart(self, folder: Path) -> Sequence[OtherHost]:
        """The hosts that do not have this folder of the controller. Each folder is tried once."""
        if folder not in self._apart:
            token = folder / f".{uuid.uuid4().hex}.token"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                token.touch()
            except OSError:
                token = folder  # it can only be read: a folder of that name is this one
            try:
                answers = await asyncio.gather(*(host.ask(files.has, token) for host in self._hosts))
            finally:
                if token != folder:
                    token.unlink()
            self._apart[folder] = [host for host, sees in zip(self._hosts, answers, strict=True) if not sees]
        return self._apart[folder]


async def _for_each(hosts: Sequence[OtherHost], transfer: Callable[[OtherHost], Awaitable[None]]) -> None:
    """Transfers from or to all hosts, a few at a time. If one fails, ends the others and raises its error."""
    limit = asyncio.Semaphore(_HOSTS_AT_ONCE)

    async def in_turn(host: OtherHost) -> None:
        async with limit:
            await transfer(host)

    tasks = [asyncio.create_task(in_turn(host)) for host in hosts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
