"""Loggers: dashboards that take a run's metrics and samples in addition to its folder.

A logger is an optional part, which the recipe's field `log` names. It is found as the entry point of that name in the
group `ownloop.loggers` (ours are in `pyproject.toml`), which names a `MakeLogger`. No other module imports one.
"""

import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from controller.runs.folder import RunFolder
from rl.checks import check_known, how_to_install
from rl.system.disk import to_json
from rl.types import Datum, ForwardBackwardOutput, Group

NUM_SAMPLES = 8
SAMPLE_COLUMNS = ("prompt", "answer", "reward")
_GROUP = "ownloop.loggers"


class Logger(Protocol):
    """Takes what a run reports, under the names that `docs/metrics.md` documents."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step or of an evaluation; `metrics["step"]` says which. Values may not be finite."""
        ...

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """Takes the rollouts of a step or of an evaluation (`split` is "eval"). A logger may keep a sample of them."""
        ...

    def close(self) -> None:
        """Returns once everything is written."""
        ...


class Observer(Protocol):
    """Watches every run, as curves and report do. Its class, made with the run's folder, is an entry point of the group
    `ownloop.observers`."""

    def resume(self, last_step: int) -> None:
        """The run continues after `last_step`."""
        ...

    def after_evaluation(self, measured: Mapping[str, str]) -> None:
        """Held-out data were measured: names of metrics (`eval_<name>`), each with that of its metric in training."""
        ...

    def after_step(self, step: int, batch: Sequence[Datum] = (), output: ForwardBackwardOutput | None = None) -> None:
        """The step's metrics and rollouts are with the folder. Without an output, the step had nothing to learn."""
        ...

    def finish(self) -> None:
        """The run has reached its end."""
        ...


class MakeLogger(Protocol):
    """The class of a logger."""

    requires: str
    """The package that it imports; the extra of ownloop that installs one of ours has the same name."""

    def __call__(self, run: Path, config: Mapping[str, Any], /) -> Logger:
        """A logger for the run in this folder. `config` is the run's configuration without secrets.

        Raises ValueError if the logger cannot begin, without a login for example.
        """
        ...


def check_loggers(names: Sequence[str]) -> None:
    """Raises ValueError for a name that no installed package has a logger for, and if its package is not installed."""
    for name in names:
        package = _find(name).requires
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"log names {name!r}, and the package {package} is not installed: {how_to_install(name)}")


def _find(name: str) -> MakeLogger:
    installed = {entry_point.name: entry_point for entry_point in entry_points(group=_GROUP)}
    check_known("log", name, installed)
    return installed[name].load()


class RunLoggers:
    """All loggers of a run. One that fails is left out from then on; the folder's errors end the run."""

    def __init__(self, names: Sequence[str], folder: RunFolder, config: object, warn: Callable[[str], None]) -> None:
        """Raises ValueError if a logger cannot begin. `warn` is called with a sentence if one fails later."""
        shown = to_json(config) if names else {}
        self._folder = folder
        self._others = {name: _find(name)(folder.path, shown) for name in names}
        self._warn = warn
        folder.loop_end.call(self.close)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Logger`."""
        self._folder.log_metrics(metrics)
        self._each(lambda logger: logger.log_metrics(metrics))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Logger`."""
        self._folder.log_rollouts(step, groups, split=split)
        self._each(lambda logger: logger.log_rollouts(step, groups, split=split))

    def close(self) -> None:
        """Closes all but the folder, which its owner closes. May be called again."""
        self._each(lambda logger: logger.close())
        self._others.clear()

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in [*self._others.items()]:
            try:
                call(logger)
            except Exception as error:
                del self._others[name]
                self._warn(f"{name} is left out from now on: {type(error).__name__}: {error}")


def sample_table(groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    """(prompt, answer, reward) of the first rollout of the first groups: what a dashboard shows of a step."""
    first = [(group.prompt, group.rollouts[0]) for group in groups if group.rollouts][:NUM_SAMPLES]
    return [(prompt, rollout.text, float(rollout.reward)) for prompt, rollout in first]


def run_id(run: Path) -> str:
    """The id under which a dashboard knows a run; kept in its folder, so that a resumed run has the same."""
    file = run / "dashboard_id"
    if not file.is_file():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
