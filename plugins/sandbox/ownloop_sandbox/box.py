"""The outside of a box for programs: `inner_serve.py`, at the other end of a pipe, runs commands and moves files.

No folder of the host is shared with a box. Files come out of it as frames, written by the box's first process, which
follows no link and waits for nothing; they are kept in a file without a name. This file imports nothing but the
standard library: Harbor's own Python reads it too.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ownloop_sandbox.inner_serve import HEAD, remove

_START_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 120.0  # for what takes seconds at most
_KILL_LIMIT_S = 10.0
_OUTPUT_BYTES = 1 << 16  # of output that is kept
_LEFT_BYTES = 256 << 20  # of all files that are read from a box
_FILE_BYTES = 64 << 20
_PART = 1 << 20
_MOST_BUFFERED = 64 << 20
Connect = Callable[[], Awaitable[tuple[StreamReader, StreamWriter]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    """None if it was killed at its time limit."""
    output: str
    """The end of its output and errors. If a limit of the box ended it, the last line says which."""
    errors: str = ""
    """The end of its errors, if they were kept apart."""


class BoxError(RuntimeError):
    """A box could not be made, or does not answer; the message says why."""


class Work:
    """The regular files that a program left in its folder, as they were when its last process was gone.

    Links, fifos and devices are not among them: they cannot be read. `work / "a.txt"` is one file.
    """

    def __init__(self) -> None:
        """Holds no file yet."""
        self._content = tempfile.TemporaryFile()  # noqa: SIM115
        self._files: dict[str, tuple[int, int, int]] = {}
        self._left_out: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of all files, relative to the folder."""
        return sorted(self._files)

    def __truediv__(self, name: str) -> "LeftFile":
        """One file, which need not be there."""
        return LeftFile(self, str(PurePosixPath(name)))

    def read(self, name: str, most: int = _FILE_BYTES) -> bytes:
        """The content of a file.

        Raises FileNotFoundError, also for what is no regular file, and ValueError if it has more than `most` bytes, or
        64 MiB, or was left out because the program left more than 256 MiB.
        """
        if name not in self._files:
            raise FileNotFoundError(f"the program left no regular file {name!r}")
        offset, size, _ = self._files[name]
        if name in self._left_out or size > most:
            raise ValueError(f"the file {name!r} has {size} bytes, too many to read; at most {most} are")
        return os.pread(self._content.fileno(), size, offset)

    def mode(self, name: str) -> int:
        """The permissions of a file."""
        return self._files[name][2]

    def close(self) -> None:
        """Forgets the files."""
        self._content.close()

    def add(self, header: Mapping[str, Any], content: bytes) -> None:
        """Adds a file."""
        offset = self._content.seek(0, os.SEEK_END)
        self._content.write(content)
        self._content.flush()
        self._files[header["name"]] = (offset, header["size"], header["mode"])
        if len(content) < header["size"]:
            self._left_out.add(header["name"])


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file of `Work`."""

    work: Work
    name: str

    def exists(self) -> bool:
        """Whether the program left a regular file of this name."""
        return self.name in self.work.names

    is_file = exists

    def read_bytes(self) -> bytes:
        """See `Work.read`."""
        return self.work.read(self.name)

    def read_text(self) -> str:
        """See `Work.read`. Raises UnicodeDecodeError if it is not UTF-8."""
        return self.read_bytes().decode()

    def __truediv__(self, name: str) -> "LeftFile":
        """A file in it, if it is a folder."""
        return self.work / f"{self.name}/{name}"


class Box:
    """A box that runs commands, in folders of its own. After `destroy` none of its processes or files is left."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str = "",
        connect: Connect | None = None,
        env: Mapping[str, str] | None = None,
        last: Sequence[str] = (),
    ) -> None:
        """`command` is one of `ways.py`, for programs, with its environment. `folder` is the host's, if it is no box.

        `connect` opens a connection with the endpoint. `last` is a command that ends the box, if its own end does not.
        """
        self.work = f"{folder}/work" if folder else "/program"
        """The folder of the program, as it sees it."""
        self.home = f"{folder}/home" if folder else "/home"
        self._command, self._folder, self._connect, self._last = command, folder, connect, last
        self._env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")} if env is None else dict(env)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._found: dict[int, Work] = {}
        self._connections: dict[int, _Connection] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._why = "it has ended"

    async def create(self) -> None:
        """Makes it. Raises `BoxError` with the reason if it cannot be made."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            cwd=self._folder or "/",
            start_new_session=True,
        )
        self._answers[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            await _within(_START_LIMIT_S, self._answers[0])
        except BaseException:
            await self.destroy()
            raise

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        time_limit_s: float | None,
        *,
        cwd: str = "",
        said: str = "",
        apart: bool = False,
    ) -> Ended:
        """Runs a command, by default in the program's folder, with `said` as its standard input.

        At the limit, and if the call is cancelled, its process group is killed. Raises `BoxError` if it cannot be
        started. `apart` keeps its errors apart from its output.
        """
        number = next(self._numbers)
        wanted = {"argv": [*argv], "env": {**env}, "cwd": cwd or self.work, "said": said, "apart": apart}
        running = asyncio.ensure_future(self._ask(b"r", {**wanted, "most": _OUTPUT_BYTES}, number=number))
        try:
            said_last = await asyncio.wait_for(asyncio.shield(running), time_limit_s)
            in_time = True
        except TimeoutError:
            self._send(b"k", number, b"")
            said_last, in_time = await _within(_ANSWER_LIMIT_S, running), False
        except BaseException:
            running.cancel()
            self._send(b"k", number, b"")
            raise
        answer, _, output = said_last.partition(b"\n")
        how = json.loads(answer)
        length = how["lengths"][0]
        limit = f"\n{how['limit']}" if how["limit"] else ""
        return Ended(
            exit_code=how["status"] if in_time else None,
            output=output[:length].decode(errors="replace") + limit,
            errors=output[length:].decode(errors="replace"),
        )

    async def put(self, name: str, content: str | bytes, *, folder: str = "", mode: int = 0o644) -> None:
        """Writes a file in a folder, in place of whatever has its name. Raises ValueError if it leads out of it."""
        data = content.encode() if isinstance(content, str) else content
        where = {"path": folder or self.work, "name": inside(name), "mode": mode}
        await _within(_ANSWER_LIMIT_S, self._ask(b"p", where, data))

    async def files(self, folder: str = "", name: str = "", most: int = _LEFT_BYTES) -> Work:
        """The regular files of a folder, or one of them.

        Raises ValueError for a name that leads out of it, and `BoxError` if it is no regular file.
        """
        number = next(self._numbers)
        found = self._found[number] = Work()
        asked = {"path": folder or self.work, "name": name and inside(name), "most": most, "each": _FILE_BYTES}
        try:
            await _within(_ANSWER_LIMIT_S, self._ask(b"f", asked, number=number))
        except BaseException:
            found.close()
            raise
        finally:
            del self._found[number]
        return found

    async def stop(self) -> None:
        """Ends every process of the box but its first, which serves it."""
        await _within(_ANSWER_LIMIT_S, self._ask(b"x", {}))

    async def destroy(self) -> None:
        """Ends every process, and removes what they left. May be called again."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # its first process then ends all others; without it, the kernel would
        try:
            await asyncio.wait_for(process.wait(), _KILL_LIMIT_S)
        except TimeoutError:  # once it has ended, its number may be that of another group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._last:
            null = subprocess.DEVNULL
            last = await asyncio.create_subprocess_exec(*self._last, env=self._env, stdout=null, stderr=null)
            await last.wait()
        if self._folder:
            await asyncio.to_thread(_remove, self._folder)

    def _send(self, kind: bytes, number: int, content: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(HEAD.pack(len(content), kind, number) + content)

    async def _ask(self, kind: bytes, asked: Mapping[str, object], content: bytes = b"", *, number: int = 0) -> bytes:
        """Sends a request and waits for its answer. Raises `BoxError` with the box's own error."""
        if self._process is None or self._reading is None or self._reading.done():
            raise BoxError(f"the box does not answer: {self._why}")
        number = number or next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(kind, number, json.dumps(asked).encode() + b"\n" + content)
        try:
            said = await answer
        finally:
            self._answers.pop(number, None)
        if said.startswith(b'{"error"'):
            raise BoxError(json.loads(said)["error"])
        return said

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Takes frames until the box ends, when all that wait for an answer hear why."""
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            while True:
                length, kind, number = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
                content = await process.stdout.readexactly(length)
                if kind == b"f" and number in self._found:
                    said, _, file = content.partition(b"\n")
                    add = partial(self._found[number].add, json.loads(said), file)
                    with contextlib.suppress(ValueError):  # who asked for it was cancelled meanwhile, and closed it
                        if length > _PART:
                            await asyncio.to_thread(add)
                        else:
                            add()
                else:
                    self._take(kind, number, content)
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(TimeoutError):
                said = await asyncio.wait_for(process.stderr.read(4096), 1.0)
                self._why = said.decode(errors="replace").strip().rpartition("\n")[2] or self._why
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(BoxError(f"the box does not answer: {self._why}"))
            for connection in [*self._connections.values()]:
                connection.end()

    def _take(self, kind: bytes, number: int, content: bytes) -> None:
        if kind in b"sz" and number in self._answers and not self._answers[number].done():
            self._answers[number].set_result(content)
        elif kind == b"n" and self._connect is not None:
            self._connections[number] = _Connection(
                self._connect, lambda *frame: self._send(frame[0], number, frame[1])
            )
        elif kind in b"dc" and number in self._connections:
            self._connections[number].give(content if kind == b"d" else b"")
            if kind == b"c" and content:
                self._connections.pop(number).end()


class _Connection:
    """A connection of a program, on its way to the endpoint."""

    def __init__(self, connect: Connect, send: Callable[[bytes, bytes], None]) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting_bytes = 0
        self._task = asyncio.create_task(self._carry(connect, send))

    def give(self, content: bytes) -> None:
        """Bytes of the program; none at its end."""
        self._waiting_bytes += len(content)
        self._waiting.put_nowait(content)
        if self._waiting_bytes > _MOST_BUFFERED:
            self.end()

    def end(self) -> None:
        """Closes it."""
        self._task.cancel()

    async def _carry(self, connect: Connect, send: Callable[[bytes, bytes], None]) -> None:
        writer: StreamWriter | None = None
        try:
            reader, writer = await connect()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._out(writer))
                while part := await reader.read(_PART):
                    send(b"d", part)
                send(b"c", b"")
        except* (OSError, asyncio.CancelledError):
            send(b"c", b"")
        finally:
            if writer is not None:
                writer.close()

    async def _out(self, writer: StreamWriter) -> None:
        while content := await self._waiting.get():
            writer.write(content)
            await writer.drain()
            self._waiting_bytes -= len(content)
        if writer.can_write_eof():
            writer.write_eof()


async def _within(limit_s: float, answer: Awaitable[bytes]) -> bytes:
    try:
        return await asyncio.wait_for(answer, limit_s)
    except TimeoutError:
        raise BoxError(f"the box did not answer within {limit_s:g} s") from None


def inside(name: str) -> str:
    """The name of a file of a folder. Raises ValueError if it leads out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"the file {name!r} is not in the program's folder; it must be a relative name without '..'")
    return str(path)


def _remove(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove(folder)
