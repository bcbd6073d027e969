"""Observers: what plug-ins do with the steps of a run, beside its folder: curves, a report, dashboards.

    StepLog --> Observers --> the folder, then each observer; one that raises is left out from then on, except that
                              `TrainingStoppedError` ends the run

Some watch every run; others, as dashboards, only a run whose recipe names them in `log`.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Generator, Mapping, Sequence

from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import RunFolder
from rl.checks import errors_of_user_code, unknown_name
from rl.system.disk import RecordingError
from rl.system.plugins import find, how_to_install, load_all
from rl.types import Datum, ForwardBackwardOutput, Group


class Observer:
    """Watches a run. An entry point of `ownloop.observers` names a subclass, which overrides what it wants to hear.

    The controller makes one for each run, and calls it in the thread of the loop. What takes long belongs into
    `RunFolder.in_background`. `TrainingStoppedError` ends the run. Metrics have the names that `docs/metrics.md`
    documents.
    """

    only_named = False
    """Whether it watches only the runs whose `log` has the entry point's name, instead of every run."""
    requires = ""
    """A package that it imports and that is not always installed; empty for none."""

    def __init__(self, folder: RunFolder) -> None:
        """The run begins, or goes on. Its configuration, without secrets, is `folder.config`.

        Raises ValueError if the observer cannot begin, without a login for example.
        """
        self.folder = folder

    def resume(self, last_step: int) -> None:
        """The run continues after `last_step`."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step or of an evaluation; `metrics["step"]` says which. Values may not be finite."""

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """Takes the rollouts of a step or of an evaluation (`split` is "eval"). An observer may keep a sample."""

    def after_evaluation(self, measured: Mapping[str, str]) -> None:
        """Held-out data were measured: names of metrics (`eval_<name>`), each with that of its metric in training."""

    def after_step(self, step: int, batch: Sequence[Datum] = (), output: ForwardBackwardOutput | None = None) -> None:
        """The step's metrics and rollouts are with the folder. Without an output, the step had nothing to learn."""

    def finish(self) -> None:
        """The run has reached its end."""

    def close(self) -> None:
        """The loop has ended, for any reason. Returns once everything is written."""


def check_observers(names: Sequence[str]) -> None:
    """Raises ValueError for a name that no installed plug-in has an observer for, and if its package is missing."""
    for name in names:
        package = _find(name).requires
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(f"log names {name!r}, which needs {package}; install it: {how_to_install(package)}")


def _find(name: str) -> type[Observer]:
    found = find("observers", name, type[Observer])
    if found is None:
        raise unknown_name("log", name, load_all("observers", type[Observer]), "observers")
    return found


class Observers:
    """All observers of a run. One that raises is left out from then on; two kinds of errors end the run."""

    def __init__(self, names: Sequence[str], folder: RunFolder, warn: Callable[[str], None]) -> None:
        """Those that `names` has and those that watch every run. `warn` is called with a sentence if one raises.

        Raises ValueError if one of `names` cannot begin.
        """
        self._folder, self._warn = folder, warn
        self._observers: dict[str, Observer] = {}
        for name in names:
            with errors_of_user_code(f"log names {name!r}"):
                self._observers[name] = _find(name)(folder)
        for name, kind in load_all("observers", type[Observer]).items():
            if name not in names and not kind.only_named:
                with self._leaves_out(name):
                    self._observers[name] = kind(folder)
        folder.loop_end.call(self.close)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        self._folder.log_metrics(metrics)
        self.each(lambda observer: observer.log_metrics(metrics))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Observer`."""
        self._folder.log_rollouts(step, groups, split=split)
        self.each(lambda observer: observer.log_rollouts(step, groups, split=split))

    def close(self) -> None:
        """Closes all but the folder, which its owner closes. May be called again."""
        self.each(lambda observer: observer.close())
        self._observers.clear()

    def each(self, call: Callable[[Observer], None]) -> None:
        """Calls every observer."""
        for name, observer in [*self._observers.items()]:
            with self._leaves_out(name):
                call(observer)

    @contextlib.contextmanager
    def _leaves_out(self, name: str) -> Generator[None]:
        try:
            yield
        except (RecordingError, TrainingStoppedError):  # a full disk is the run's problem
            raise
        except Exception as error:
            self._observers.pop(name, None)
            self._warn(f"{name} is left out from now on: {type(error).__name__}: {error}")
