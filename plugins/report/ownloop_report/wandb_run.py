"""Weights & Biases: one run there for one run here, also when it is resumed.

Its own settings hold: WANDB_PROJECT (by default `ownloop`), WANDB_ENTITY, WANDB_API_KEY or `wandb login`, and
WANDB_MODE=offline, after which `wandb sync` sends what is in the run's folder `wandb/`.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from controller.runs.folder import RunFolder
from controller.runs.observers import Observer
from ownloop_report.dashboards import SAMPLE_COLUMNS, SentAlready, grouped, run_id, sample_table
from rl.types import Group

_OFFLINE = ("offline", "dryrun", "disabled")


class WandbRun(Observer):
    """Logs metrics against `step`, and samples as tables."""

    only_named = True
    requires = "wandb"

    def __init__(self, folder: RunFolder) -> None:
        """Raises ValueError without a login, and if the service does not answer."""
        super().__init__(folder)
        self._sent = SentAlready(folder.path)
        import wandb
        from wandb.errors import Error

        if os.environ.get("WANDB_MODE", "online") not in _OFFLINE and not _has_login(wandb):
            raise ValueError(
                "log names wandb, and there is no login: set WANDB_API_KEY, run `wandb login`, or set "
                "WANDB_MODE=offline and send the run later with `wandb sync`"
            )
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ownloop"),
                name=folder.path.name,
                id=run_id(folder.path),
                resume="allow",
                dir=folder.path,
                config=dict(folder.config),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
            )
        except Error as error:
            raise ValueError(
                f"log names wandb, which cannot be reached: {error}; WANDB_MODE=offline needs no network"
            ) from None
        self._table, self._teardown = wandb.Table, wandb.teardown
        self._run.define_metric("*", step_metric="step")

    def resume(self, last_step: int) -> None:
        """See `Observer`."""
        del last_step
        self._sent = SentAlready(self.folder.path)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        if metrics not in self._sent:
            self._run.log(grouped(metrics))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Observer`. Keeps evaluations only: each table is a file, which is too much for every step."""
        if split == "train":
            return
        table = self._table(columns=[*SAMPLE_COLUMNS], data=[[*row] for row in sample_table(groups)])
        self._run.log({f"samples/{split}": table, "step": step})

    def close(self) -> None:
        """See `Observer`. Ends W&B's process too, which its handler at exit would miss: a run ends its children."""
        self._run.finish()
        self._teardown()


def _has_login(wandb: Any) -> bool:
    """Whether a key is in the environment or in the file that `wandb login` writes. Asks for no input."""
    return bool(wandb.api.api_key)
