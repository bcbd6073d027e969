"""torch's profiler for chosen optimizer steps of a rank, which `TrainerConfig.profile_steps` names.

Each step is a file of its own, in Chrome's trace format, beside the rank's log: `profile-trainer-0-step-3.json.gz`. It
begins with the step's first call of the engine and ends with its `optim_step`. It opens in Perfetto
(https://ui.perfetto.dev). Under the profiler a step takes longer, so its times are to be compared with each other.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.engines.base import Engine

P = ParamSpec("P")
T = TypeVar("T")
_VERBS = ("forward", "forward_backward", "optim_step")
_LOG_FILE = "OWNLOOP_LOG_FILE"
"""What the process of a rank writes to; the controller sets it."""


def profile_steps(engine: Engine, steps: str) -> None:
    """Has an engine record the steps `first:last` when they come. A skipped step is recorded with the one after it."""
    first, last = map(int, steps.split(":"))
    log = Path(os.environ.get(_LOG_FILE, "trainer-0.log"))
    StepProfile(engine, range(first, last + 1), log.parent / f"profile-{log.stem}").wrap()


class StepProfile:
    """The profiler of one engine. `file` is the beginning of its files' paths."""

    def __init__(self, engine: Engine, steps: range, file: Path) -> None:
        """Records nothing yet."""
        self._engine, self._steps, self._file = engine, steps, file
        self._running: profile | None = None

    def wrap(self) -> None:
        """Puts itself before the engine's calls."""
        for verb in _VERBS:
            setattr(self._engine, verb, self._recorded(verb, getattr(self._engine, verb)))

    def _recorded(self, verb: str, call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def recorded(*arguments: P.args, **options: P.kwargs) -> T:
            step = self._engine.policy_version + 1
            if step not in self._steps:
                return call(*arguments, **options)
            if self._running is None:
                activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
                self._running = profile(activities=activities)
                self._running.start()
            with record_function(verb):
                result = call(*arguments, **options)
            if self._engine.policy_version >= step:
                self._running.stop()
                self._running.export_chrome_trace(f"{self._file}-step-{step}.json.gz")
                self._running = None
            return result

        return recorded
