"""Serves a box from within, as its first process: runs commands, carries their requests to the endpoint, moves files.

`inner_run.py` runs it, in a Python without site-packages, so it imports nothing but the standard library. Standard
input and output are the channel of `box.py`. A frame is `HEAD` (length of the content, kind, number) and the content.

| kind | asks for, with a number of its own | answer |
|---|---|---|
| r | a command; the content is JSON | z: its status as JSON, a line break, its output |
| k | the end of the process group of the command of that number | |
| p | a file to write: JSON, a line break, its bytes | z |
| f | the regular files of a folder, or one of them: JSON | f for each: JSON, a line break, its bytes; then z |
| x | the end of all other processes | z |
| n, d, c | a new connection with the endpoint (from within), its bytes, the end of them | |
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

HEAD = struct.Struct(">IcI")
_LOOK_S = 0.1
_PART = 1 << 16
_MOST_PARTS = 32  # a pipe of an ordinary user holds 16 at most
_MOST_BUFFERED = 64 << 20
_MOST_CONNECTIONS = 256
_MOST_DEPTH = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Command:
    """A command that was asked for. Its process group has the number of its process."""

    def __init__(self, number: int, process: int, pipes: list[int], most: int) -> None:
        self.number, self.process, self.most = number, process, most
        self.outputs, self.pipes = {pipe: bytearray() for pipe in pipes}, {*pipes}

    def read(self, pipe: int) -> bool:
        """Keeps the end of what a full pipe holds; others may go on writing. False at the end of the pipe."""
        output = self.outputs[pipe]
        for _ in range(_MOST_PARTS):
            try:
                part = os.read(pipe, _PART)
            except BlockingIOError:
                break
            output += part
            del output[: -self.most]
            if not part:
                return False
        return True


class Connection:
    """A connection of a program, which leads to the endpoint."""

    def __init__(self, client: socket.socket) -> None:
        self.client, self.unsent, self.reading, self.writing = client, bytearray(), True, True


class Server:
    """Answers frames until standard input is closed."""

    def __init__(self, port: int, memory_bytes: int, num_files: int, folder: str, path: str) -> None:
        """No port: nothing can be reached. Memory and files are looked at where this is process 1; 0 is no limit.

        `folder` is removed at the end. `path` is where commands are looked for; "" is as in this process.
        """
        self.memory_bytes, self.num_files, self.is_first = memory_bytes, num_files, os.getpid() == 1
        self.folder, self.path = folder, path or os.environ.get("PATH", os.defpath)
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, Command] = {}
        self.connections: dict[int, Connection] = {}
        self.num_connected = 0
        self.received = bytearray()
        self.stopped_by = ""
        """The limit that ended the processes, once one has."""
        self.wake, wake = socket.socketpair()
        for end in (self.wake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._kept = wake
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self.selector.register(0, selectors.EVENT_READ, self.receive)
        self.selector.register(self.wake, selectors.EVENT_READ, lambda: self.wake.recv(_PART))
        if port:
            self.listener = socket.create_server(("127.0.0.1", port), backlog=128)
            self.listener.setblocking(False)
            self.selector.register(self.listener, selectors.EVENT_READ, self.connect)

    def serve(self) -> None:
        """Until the other side closes."""
        self.send(b"s", 0, b"")
        looked = time.monotonic()
        while True:
            for key, _ in self.selector.select(_LOOK_S):
                if self.selector.get_map().get(key.fd) is key:  # what came before it may have closed it
                    key.data()
            self.reap()
            if self.is_first and self.commands and time.monotonic() - looked > _LOOK_S:
                self.look()
                looked = time.monotonic()

    def send(self, kind: bytes, number: int, content: bytes) -> None:
        """Sends a frame. Waits until the other side has room; where it has ended, standard input says so next."""
        rest = memoryview(HEAD.pack(len(content), kind, number) + content)
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(1, rest) :]

    def receive(self) -> None:
        """Does what was asked for."""
        part = os.read(0, 1 << 20)
        if not part:
            self.stop()
            if self.folder:
                remove(self.folder)
            sys.exit(0)
        self.received += part
        while len(self.received) >= HEAD.size:
            length, kind, number = HEAD.unpack_from(self.received)
            if len(self.received) < HEAD.size + length:
                return
            content = bytes(self.received[HEAD.size : HEAD.size + length])
            del self.received[: HEAD.size + length]
            if kind in b"dc":
                self.forward(number, content, ends=kind == b"c")
                continue
            try:
                self.do(kind, number, content)
            except (OSError, ValueError) as error:
                self.send(b"z", number, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")

    def do(self, kind: bytes, number: int, content: bytes) -> None:
        """One request other than the bytes of a connection."""
        if kind == b"k":
            for command in self.commands.values():
                if command.number == number:
                    os.killpg(command.process, signal.SIGKILL)
            return
        said, _, rest = content.partition(b"\n")
        asked: dict[str, Any] = json.loads(said) if said else {}
        if kind == b"r":
            self.run(number, **asked)
            return
        if kind == b"p":
            put(asked["path"], asked["name"], rest, asked["mode"])
        elif kind == b"f":
            for header, file in files(**asked, single_links=not self.is_first):
                self.send(b"f", number, json.dumps(header).encode() + b"\n" + file)
        elif kind == b"x":
            self.stop()
        self.send(b"z", number, b"{}\n")

    def run(
        self, number: int, argv: list[str], env: dict[str, str], cwd: str, most: int, *, said: str, apart: bool
    ) -> None:
        """Starts a command; `apart` keeps its errors apart from its output."""
        self.stopped_by = self.stopped_by if self.commands else ""
        unsent = bytearray(said.encode())  # raises for what is not Unicode, before the command starts
        pipes = [os.pipe() for _ in range(1 + apart)]
        try:
            process = subprocess.Popen(
                argv,
                env={"PATH": self.path, **env},
                cwd=cwd,
                bufsize=0,
                stdin=subprocess.PIPE if said else subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[-1][1],
                start_new_session=True,
            )
        except BaseException:
            for start, _ in pipes:
                os.close(start)
            raise
        finally:
            for _, end in pipes:
                os.close(end)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            write = partial(self.write, process.stdin, unsent)
            self.selector.register(process.stdin, selectors.EVENT_WRITE, write)
        process.returncode = 0  # this server waits for all processes itself
        command = Command(number, process.pid, [end for end, _ in pipes], most)
        self.commands[process.pid] = command
        for pipe in command.pipes:
            os.set_blocking(pipe, False)
            self.selector.register(pipe, selectors.EVENT_READ, partial(self.read, command, pipe))

    def write(self, pipe: IO[bytes], unsent: bytearray) -> None:
        """Gives a command as much of its standard input as it takes. Closes it at the end, or when nobody reads it."""
        with contextlib.suppress(BrokenPipeError):
            del unsent[: pipe.write(unsent) or 0]
            if unsent:
                return
        self.selector.unregister(pipe)
        pipe.close()

    def read(self, command: Command, pipe: int) -> None:
        """Takes what a command wrote. Processes that it left behind may go on writing after its end."""
        if not command.read(pipe):
            self.selector.unregister(pipe)
            os.close(pipe)
            command.pipes.remove(pipe)

    def reap(self) -> None:
        """Answers for the commands that have ended. All orphans of the box are children of this process."""
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(-1, os.WNOHANG)
            while ended:
                self.finish(ended, status)
                ended, status = os.waitpid(-1, os.WNOHANG)

    def finish(self, process: int, status: int) -> None:
        """Answers for one command, if the process is one."""
        command = self.commands.pop(process, None)
        if command is None:
            return
        for pipe in [*command.pipes]:
            self.read(command, pipe)
        code = os.waitstatus_to_exitcode(status)
        said = {
            "status": code if code >= 0 else 128 - code,  # as a shell reports a signal
            "limit": self.stopped_by,
            "lengths": [*map(len, command.outputs.values())],
        }
        self.send(b"z", command.number, json.dumps(said).encode() + b"\n" + b"".join(command.outputs.values()))

    def look(self) -> None:
        """Ends all processes when they have too much memory, or when there are too many files."""
        spaces = {os.stat(path).st_dev: os.statvfs(path) for path in ("/tmp", "/program", "/dev/shm")}.values()
        others = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        used = sum((space.f_blocks - space.f_bfree) * space.f_frsize for space in spaces)
        if self.num_files and sum(space.f_files - space.f_ffree for space in spaces) > self.num_files:
            self.stopped_by = f"it made more than {self.num_files} files"
        elif self.memory_bytes and used + sum(map(memory_of, others)) > self.memory_bytes:
            self.stopped_by = f"its processes and files took more than {self.memory_bytes} bytes of memory"
        else:
            return
        os.kill(-1, signal.SIGKILL)

    def stop(self) -> None:
        """Returns when no other process of the box is left."""
        try:
            while True:
                if self.is_first:
                    os.kill(-1, signal.SIGKILL)
                else:  # orphans become children of this process
                    for child in children(os.getpid()):
                        os.kill(child, signal.SIGKILL)
                self.finish(*os.waitpid(-1, 0))
        except (ChildProcessError, ProcessLookupError):
            self.reap()

    def connect(self) -> None:
        """A program connects with what it takes for the endpoint."""
        client, _ = self.listener.accept()
        if len(self.connections) >= _MOST_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        self.num_connected += 1
        self.connections[self.num_connected] = Connection(client)
        self.send(b"n", self.num_connected, b"")
        self.watch(self.num_connected)

    def watch(self, number: int) -> None:
        """Waits for what a connection is ready for, or closes it if both directions are at their end."""
        connection = self.connections[number]
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection.client)
        events = selectors.EVENT_READ * connection.reading | selectors.EVENT_WRITE * bool(connection.unsent)
        if events:
            self.selector.register(connection.client, events, lambda: self.move(number))
        elif not connection.writing:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Ends a connection."""
        connection = self.connections.pop(number)
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection.client)
        connection.client.close()
        self.send(b"c", number, b"x")

    def move(self, number: int) -> None:
        """Moves bytes of a connection that is ready."""
        connection = self.connections[number]
        try:
            if connection.unsent:
                with contextlib.suppress(BlockingIOError):
                    del connection.unsent[: connection.client.send(connection.unsent)]
                if not connection.unsent and not connection.writing:
                    connection.client.shutdown(socket.SHUT_WR)
            if connection.reading:
                with contextlib.suppress(BlockingIOError):
                    part = connection.client.recv(_PART)
                    connection.reading = bool(part)
                    self.send(b"d" if part else b"c", number, part)
            self.watch(number)
        except OSError:
            self.drop(number)

    def forward(self, number: int, content: bytes, *, ends: bool) -> None:
        """Bytes of the endpoint, or the end of them."""
        connection = self.connections.get(number)
        if connection is None:
            return
        connection.unsent += content
        connection.writing = connection.writing and not ends
        if len(connection.unsent) > _MOST_BUFFERED:
            self.drop(number)
            return
        if ends and not connection.unsent:
            with contextlib.suppress(OSError):
                connection.client.shutdown(socket.SHUT_WR)
        self.watch(number)


def children(process: int) -> list[int]:
    """The processes whose parent is this one."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == process:
                found.append(int(name))
    return found


def memory_of(name: str) -> int:
    """Memory of a process. What several processes share is divided among them, where they let it be seen."""
    with contextlib.suppress(OSError), open(f"/proc/{name}/smaps_rollup", "rb") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    with contextlib.suppress(OSError), open(f"/proc/{name}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def remove(path: str) -> None:
    """Removes a file, or a folder however deep: what lies two levels below is moved up before its parent is removed."""
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
        return
    number = 0
    while inner := [entry.path for entry in _listed(path) if entry.is_dir(follow_symlinks=False)]:
        for folder in inner:
            for entry in _listed(folder):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                while os.path.lexists(moved := f"{path}/{number}"):
                    number += 1
                os.rename(entry.path, moved)
            os.rmdir(folder)
    for entry in _listed(path):
        os.unlink(entry.path)
    os.rmdir(path)


def _listed(path: str) -> list[os.DirEntry[str]]:
    os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        return list(entries)


def put(path: str, name: str, content: bytes, mode: int) -> None:
    """Writes a file of a folder, in place of whatever has its name or is in the way to it. Follows no link."""
    *parents, last = name.split("/")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            path += f"/{parent}"
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        with contextlib.suppress(FileNotFoundError):
            remove(f"{path}/{last}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(last, flags, mode, dir_fd=folder), "wb") as file:
            file.write(content)
    finally:
        os.close(folder)


def files(
    path: str, name: str, most: int, each: int, *, single_links: bool
) -> Iterator[tuple[dict[str, object], bytes]]:
    """The regular files below a folder, `name` alone if it is given, with names, modes and sizes. Follows no link.

    Small ones come first. Raises ValueError for a name of something else. Files of more than `each` bytes, or that
    would go beyond `most` bytes in all, come without content, and those more than 64 folders deep do not come.
    `single_links` leaves out what has several names.
    """
    waiting, found = [] if name else [(path, "", 0)], [(0, name)] if name else []
    while waiting:
        folder, prefix, depth = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and depth < _MOST_DEPTH:
                    waiting.append((entry.path, f"{prefix}{entry.name}/", depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_size, prefix + entry.name))
    for _, file in sorted(found):
        try:
            header, content = read(path, file, min(most, each), single_links=single_links)
        except (OSError, ValueError):
            if name:
                raise
            continue
        most -= len(content)
        yield header, content


def read(path: str, name: str, most: int, *, single_links: bool) -> tuple[dict[str, Any], bytes]:
    """One file of a folder. Raises ValueError if it is no regular file."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, last = name.split("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        for parent in parents:
            inner = os.open(parent, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        with open(os.open(last, flags, dir_fd=folder), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or (single_links and found.st_nlink > 1):
                raise ValueError(f"{name!r} is no regular file")
            header = {"name": name, "mode": stat.S_IMODE(found.st_mode), "size": found.st_size}
            return header, file.read(most) if found.st_size <= most else b""
    finally:
        os.close(folder)


if __name__ == "__main__":
    Server(**json.loads(sys.argv[2])).serve()
