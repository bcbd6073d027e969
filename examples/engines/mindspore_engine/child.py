"""A process in another Python environment: calls with NumPy arrays, its errors as exceptions, its end with ours.

`Child` is our end, `serve` the other. Both ends import this module, so it needs only the standard library. Messages are
pickles over a socket pair, which only these two processes hold.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from socket import socketpair
from typing import IO, Any, NoReturn

_LOG_TAIL_BYTES = 4000


class ChildError(RuntimeError):
    """The child raised an error, whose traceback is the message; or it did not start, or it ended."""


class Child:
    """A running child. It ends when this object is dropped, and when this process ends, however it ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], start_timeout_s: float) -> None:
        """Runs `command` with one more argument, from which `serve` finds its end of the socket.

        Raises ChildError, with the end of what the child printed, if it is not serving within `start_timeout_s`.
        """
        ours, theirs = socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `_end`
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.PIPE,  # closed by the system when this process ends, which the child watches for
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self._process, self._connection, self._log)
        if not self._connection.poll(start_timeout_s):
            self._process.kill()
            self._lost(f"did not start within {start_timeout_s:g} s and was killed")
        self._receive()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, verb: str, *arguments: Any) -> Any:
        """Has the child call a function of its table and returns the result.

        It has no deadline of its own: the trainer's `Deadlines` end a rank that hangs, and with it the child. Raises
        ValueError if the function does, and ChildError if it raises anything else or if the child has ended.
        """
        if not self._end.alive:
            raise ChildError("the child has ended; an earlier call says why")
        try:
            self._connection.send((verb, arguments))
            return self._receive()
        except (ChildError, ValueError):
            raise
        except OSError:
            self._lost("ended")
        except BaseException:
            self.close()  # a reply that was not read would answer the next call
            raise

    def close(self) -> None:
        """Ends the child. It may be called again."""
        self._end()

    def _receive(self) -> Any:
        try:
            kind, content = self._connection.recv()
        except EOFError:
            self._lost("ended")
        if kind == "ValueError":
            raise ValueError(content)
        if kind == "error":
            raise ChildError(f"the child raised an error:\n{content}")
        return content

    def _lost(self, how: str) -> NoReturn:
        """Ends the child and says why it is lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # its socket is closed a moment before it has ended
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        log = self._log.read().decode(errors="replace")
        self.close()
        raise ChildError(f"the child {how}; exit status: {self._process.returncode}; the end of its output:\n{log}")


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answers the calls of the parent, one after the other, until it drops its `Child` or ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(int(sys.argv[-1]))
    connection.send(("result", None))
    while True:
        try:
            verb, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = ("result", functions[verb](*arguments))
        except ValueError as error:
            reply = ("ValueError", str(error))
        except Exception:
            reply = ("error", traceback.format_exc())
        connection.send(reply)


def _end_with_parent() -> None:
    """Ends this process, in the middle of a call too, once the parent's end of stdin is closed."""
    sys.stdin.buffer.read()
    os._exit(0)


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    connection.close()
    process.kill()
    process.communicate()
    log.close()
