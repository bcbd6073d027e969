"""Keeps a run's `report.html` and `timeline.json` up to date while it goes on, at less than 1 % of its time.

Both are written by the thread that writes the recordings. How often the page is written follows from how long it took
the last time, so that a long run, whose page takes longer, writes it less often.
"""

import contextlib
import time
import traceback
from collections.abc import Sequence
from functools import partial

from controller.runs.folder import HOST_FILE, RunFolder
from controller.runs.report.page import write_report
from controller.runs.report.samples import TokenSamples
from controller.runs.run_tokenizer import decoder_of
from rl.hardware import describe_host, describe_software
from rl.heap import hand_back_garbage
from rl.system.files import RecordingError, write_json
from rl.system.timeline import TIMELINE, Timeline
from rl.types import Datum, ForwardBackwardOutput

_SECONDS_BETWEEN = 30.0
_TIMELINE_SECONDS_BETWEEN = 10.0
_LARGEST_SHARE = 0.01


class LiveReport:
    """The page and the timeline of one run."""

    def __init__(self, folder: RunFolder) -> None:
        """From now on, phases and calls of the current context are in the timeline."""
        self._folder = folder
        host = {"hardware": describe_host(), "versions": describe_software()}
        folder.in_background(partial(write_json, folder.path / HOST_FILE, host))
        self._timeline = Timeline(folder.path / TIMELINE)
        self._timeline.activate()
        self._samples = TokenSamples(folder.path, 0)
        self._num_steps = 0
        folder.loop_end.call(self._stop)
        self._last: tuple[int, Sequence[Datum], ForwardBackwardOutput] | None = None
        self._page_due_at = time.monotonic() + _SECONDS_BETWEEN
        self._timeline_due_at = time.monotonic() + _TIMELINE_SECONDS_BETWEEN

    def resume(self, last_step: int) -> None:
        """The run goes on after `last_step`."""
        self._samples = TokenSamples(self._folder.path, last_step)

    def after_step(self, step: int, batch: Sequence[Datum] = (), output: ForwardBackwardOutput | None = None) -> None:
        """Has the files written if they are due. Call it once the step's metrics and rollouts are handed over."""
        self._num_steps += 1
        self._last = self._last if output is None else (step, batch, output)
        now = time.monotonic()
        if now >= self._page_due_at:
            self._page_due_at = float("inf")  # until it is written
            self._add_samples()
            self._folder.in_background(self._write_page)
        elif now >= self._timeline_due_at:
            self._timeline_due_at = now + _TIMELINE_SECONDS_BETWEEN
            self._folder.in_background(self._timeline.write)

    def finish(self) -> None:
        """Has the files written, for a run that is over."""
        self._write_last_page("finished")

    def _stop(self) -> None:
        """Has the files written for a run that ended before its end, if it has done a step."""
        if self._num_steps:
            with contextlib.suppress(RecordingError):  # which has ended the run
                self._write_last_page("stopped")

    def _write_last_page(self, state: str) -> None:
        self._num_steps = 0
        self._add_samples()
        self._folder.in_background(lambda: self._write_page(state=state))

    def _add_samples(self) -> None:
        """Keeps some answers of the last step with an update."""
        if self._last is not None:
            self._samples.add(*self._last)
            self._last = None

    def _write_page(self, state: str | None = None) -> None:
        """Writes both files. A mistake in the page is in the log, and does not end the run; a full disk does."""
        started = time.thread_time()
        try:
            self._timeline.write()
            self._samples.write()
            write_report(self._folder.path, decoder_of(self._folder.path), self._folder.command, state=state)
        except RecordingError:
            raise
        except Exception:
            traceback.print_exc()
        hand_back_garbage()
        took = time.thread_time() - started
        self._page_due_at = time.monotonic() + max(_SECONDS_BETWEEN, took / _LARGEST_SHARE)
