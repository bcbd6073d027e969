"""Keeps the terminal for the console: the output of libraries in this process goes to a log file.

File descriptors are redirected, which catches native libraries too. The processes of a mesh do the same for themselves
(`controller.processes.mesh`).
"""

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TextIO


class CapturedOutput:
    """Redirects standard output and error of this process while the block lasts.

        with CapturedOutput() as output:
            import noisy_library
            output.move_to(run.logs / "controller.log")
            print("for the user", file=output.terminal)

    Until `move_to` names a file, the output is held in a temporary file; it is lost if the block ends before.
    """

    terminal: TextIO
    """The real standard output."""
    errors: TextIO
    """The real standard error."""

    def __enter__(self) -> "CapturedOutput":
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self.terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        self.errors = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        self._log = tempfile.TemporaryFile("w+b", prefix="ownloop-")
        self._redirect(self._log.fileno())
        return self

    def say(self, text: str) -> None:
        """Prints a line on the real standard error."""
        print(text, file=self.errors)

    def move_to(self, file: Path) -> None:
        """Appends the output held so far to `file`, and all later output."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._log.flush()
        target = file.open("a+b")
        self._log.seek(0)
        shutil.copyfileobj(self._log, target)
        target.flush()
        self._redirect(target.fileno())
        self._log.close()
        self._log = target

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # the disk of the log is full: what Python still holds of it must not come on the terminal
            with Path(os.devnull).open("wb") as null:
                self._redirect(null.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
        for number, saved in enumerate(self._saved, start=1):
            os.dup2(saved, number)
            os.close(saved)
        self._log.close()
        for stream in (self.errors, self.terminal):
            try:
                stream.close()
            except OSError as problem:  # what was not written to a terminal that is gone is tried again here
                if problem.errno != errno.EIO:
                    raise

    @staticmethod
    def _redirect(descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
