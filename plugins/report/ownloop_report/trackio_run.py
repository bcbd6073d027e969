"""trackio: a dashboard in a local database, shown by `trackio show`. TRACKIO_DIR says where it is kept."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from controller.runs.folder import RunFolder
from controller.runs.observers import Observer
from ownloop_report.dashboards import SAMPLE_COLUMNS, SentAlready, grouped, run_id, sample_table
from rl.types import Group


class TrackioRun(Observer):
    """Logs metrics by their steps, and the samples of evaluations as tables."""

    only_named = True
    requires = "trackio"

    def __init__(self, folder: RunFolder) -> None:
        """The run has an id of its own there."""
        super().__init__(folder)
        self._sent = SentAlready(folder.path)
        trackio: object = import_module("trackio")  # where it is not installed, type checkers know nothing of it
        self._table: Any = trackio.Table
        self._run: Any = trackio.init(
            project="ownloop",
            name=f"{folder.path.name}-{run_id(folder.path)}",  # trackio knows runs by their names
            config=dict(folder.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def resume(self, last_step: int) -> None:
        """See `Observer`."""
        del last_step
        self._sent = SentAlready(self.folder.path)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Observer`. Its database holds finite values only."""
        finite = {name: value for name, value in grouped(metrics).items() if name != "step" and math.isfinite(value)}
        if metrics not in self._sent:
            self._run.log(finite, step=int(metrics["step"]))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Observer`."""
        if split != "train":
            table = self._table(columns=[*SAMPLE_COLUMNS], data=[[*row] for row in sample_table(groups)])
            self._run.log({f"samples/{split}": table}, step=step)

    def close(self) -> None:
        """See `Observer`."""
        self._run.finish()
