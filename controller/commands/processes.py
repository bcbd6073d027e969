"""Ends a command's work on SIGINT, SIGTERM or SIGHUP, and with it every process that it started, within a fixed time.

A thread of its own consumes the signals; it is woken even while the main thread is inside native code. It cancels the
work's task; a run then saves the last finished step and closes the meshes. If they are not closed by the deadline, it
kills the processes that are left and ends this process. It knows nothing of Monarch and finds processes in the process
table.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar
from weakref import ref

from controller.commands.command_line import FAILED, CommandEndedError
from controller.commands.output import CapturedOutput
from rl.checks import told

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_WITHIN_S = 8.0  # a user is promised that everything is over within 10 s, if there is nothing to save
# Slurm and Kubernetes kill a process 30 s after its SIGTERM. Who presses Ctrl-C may press it again.
_SAVE_DEADLINE_S = {signal.SIGTERM: 25.0, signal.SIGINT: 120.0, signal.SIGHUP: 120.0}
SAME_SIGNAL_S = 0.3  # a terminal and a wrapper around the command, such as make, may each pass on the same Ctrl-C

T = TypeVar("T")


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, so that `descendants` finds them. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Process ids of all live processes that this one started, directly or indirectly."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def end_descendants(grace_s: float) -> int:
    """Ends every descendant, by SIGTERM and after `grace_s` seconds by SIGKILL. Returns their number."""
    count, kill = len(descendants()), signal.SIGKILL
    for number, patience_s, trackers in ((signal.SIGTERM, grace_s, False), (kill, 2.0, False), (kill, 1.0, True)):
        end = time.monotonic() + patience_s
        for pid in descendants():
            with contextlib.suppress(OSError):
                # Python's resource tracker ends by itself, and removes the semaphores of its dead parent.
                if trackers or b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
        while descendants() and time.monotonic() < end:
            time.sleep(0.02)
    return count


class StopSignals:
    """While the block lasts, SIGINT, SIGTERM and SIGHUP cancel `run`. A second signal, or a deadline, ends the process.

        with StopSignals(at_deadline=say_so) as stop:
            stop.run(main())
        if stop.received: ...

    The deadline is 8 s. A run that saves has 25 s after SIGTERM and two minutes after the others. A second SIGHUP does
    not count as a further request, since both the kernel and the shell send one when a terminal is closed. Must be
    entered in the main thread.
    """

    def __init__(
        self,
        at_deadline: Callable[[], None],
        is_saving: Callable[[], bool] = lambda: False,
        *,
        stop_within_s: float = STOP_WITHIN_S,
        same_signal_s: float = SAME_SIGNAL_S,
    ) -> None:
        """`at_deadline` runs in another thread, once all descendants are dead and right before the process ends.

        `is_saving` says, whenever it is called, whether the run is saving because of the signal. The deadline of a run
        that does not save is `stop_within_s`. A signal within `same_signal_s` of the first one is the same.
        """
        self.received: int | None = None
        """The number of the first signal received, if any."""
        self._at_deadline = at_deadline
        self._is_saving = is_saving
        self._stop_within_s = stop_within_s
        self._same_signal_s = same_signal_s
        self._received_at = 0.0
        self._over = threading.Event()
        self._again = threading.Event()
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None
        self._lock = threading.RLock()  # the handler may run while the main thread holds it

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # `nohup` starts a command with SIGHUP ignored, so that it outlives its terminal.
        numbers = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._in_main_thread) for number in numbers}
        os.register_at_fork(  # a signal to a child waits until the child has its own handlers
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, _SIGNALS),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS),
            after_in_child=partial(_restore_in_child, ref(self)),
        )
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.restore()
        self._writer.close()

    def restore(self) -> None:
        """Handles signals as before the block, unless that was done already."""
        previous, self._previous = self._previous, {}
        if previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in an event loop of its own and returns its result; a signal cancels it."""

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            with self._lock:
                self._task = (asyncio.get_running_loop(), task)
                if self.received is not None:
                    task.cancel()
            return await work

        return asyncio.run(cancellable())

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """Python's own handler. It matters only if another library took over the descriptor that wakes the thread."""
        del frame
        self._receive(number, from_handler=True)

    def _listen(self) -> None:
        """The thread: one byte per signal, its number, until the other end is closed."""
        with self._reader:
            while data := self._reader.recv(16):
                for number in data:
                    if number in _SIGNALS:
                        self._receive(number)

    def _receive(self, number: int, *, from_handler: bool = False) -> None:
        with self._lock:
            if self.received is not None:
                late = time.monotonic() - self._received_at > self._same_signal_s
                if late and number != signal.SIGHUP and not from_handler:  # each signal comes both ways
                    self._again.set()
                return
            self.received, self._received_at = number, time.monotonic()
            if self._task is not None:
                loop, task = self._task
                with contextlib.suppress(RuntimeError):  # the loop is closed: the run has just ended by itself
                    loop.call_soon_threadsafe(task.cancel)
        threading.Thread(target=self._await_end, name="stop-deadline", daemon=True).start()

    def _await_end(self) -> None:
        """Ends every process, this one last, unless the block is left in time."""
        assert self.received is not None
        began = time.monotonic()
        end, last_end = began + self._stop_within_s, began + _SAVE_DEADLINE_S[signal.Signals(self.received)]
        while not self._over.wait(0.05):
            if self._is_saving():  # asked first: this process may have been stopped for longer than `end`
                end = min(time.monotonic() + self._stop_within_s, last_end)  # what comes after has as long as without
            if self._again.is_set() or time.monotonic() >= end:
                break
        else:
            return
        end_descendants(grace_s=0)
        try:
            self._at_deadline()
        finally:
            os._exit(128 + self.received)


def _restore_in_child(stop: "ref[StopSignals]") -> None:
    """A forked process, such as a worker of a reward's pool, has the descriptor too, and would stop the run itself."""
    if (signals := stop()) is not None:
        signals.restore()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def finish(work: Coroutine[Any, Any, T], output: CapturedOutput) -> T:
    """The result of the work. SIGINT, SIGTERM and SIGHUP end it.

    Raises `CommandEndedError` for a signal and for any error but a ValueError, which says what the user should change.
    """
    adopt_orphans()
    with StopSignals(lambda: None) as stop:
        try:
            return stop.run(work)
        except ValueError:
            raise
        except Exception as error:
            print(f"error: {type(error).__name__}: {told(error)}", file=output.errors)
            raise CommandEndedError(FAILED) from error
        except BaseException as error:
            if stop.received is None:
                raise
            raise CommandEndedError(128 + stop.received) from error
        finally:
            end_descendants(grace_s=0.5)
