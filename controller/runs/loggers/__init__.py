"""Where a run's metrics and samples go beside its own folder: TensorBoard, Weights & Biases, trackio."""

import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from controller.runs.folder import RunFolder
from controller.runs.loggers.event_files import EventFiles
from controller.runs.loggers.trackio_run import TrackioRun
from controller.runs.loggers.wandb_run import WandbRun
from rl.checks import check_known, how_to_install
from rl.secret_fields import hide_secrets
from rl.system.files import to_json
from rl.types import Group

NUM_SAMPLES = 8
SAMPLE_COLUMNS = ("prompt", "answer", "reward")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    package: str
    """What must be installed; the extra of ownloop that installs it has the same name."""
    make: Callable[[Path, Mapping[str, Any]], Logger]


LOGGERS: Mapping[str, _Entry] = {
    "tensorboard": _Entry(package="tensorboard", make=EventFiles),
    "wandb": _Entry(package="wandb", make=WandbRun),
    "trackio": _Entry(package="trackio", make=TrackioRun),
}


def check_loggers(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is not in `LOGGERS`, or whose package is not installed."""
    for name in names:
        check_known("log", name, LOGGERS)
        package = LOGGERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"log names {name!r}, and the package {package} is not installed: {how_to_install(name)}")


class RunLoggers:
    """All loggers of a run. One that fails is left out from then on; the folder's errors end the run."""

    def __init__(self, names: Sequence[str], folder: RunFolder, config: object, warn: Callable[[str], None]) -> None:
        """Raises ValueError if a logger cannot begin, without a login for example. `warn` is told of later failures."""
        shown = hide_secrets(to_json(config)) if names else {}
        self._folder = folder
        self._others = {name: LOGGERS[name].make(folder.path, shown) for name in names}
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
