"""Weights & Biases: one run there for one run here, also when it is resumed.

Its own settings hold: WANDB_PROJECT (by default `ownloop`), WANDB_ENTITY, WANDB_API_KEY or `wandb login`, and
WANDB_MODE=offline, after which `wandb sync` sends what is in the run's folder `wandb/`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.runs.loggers import SAMPLE_COLUMNS, run_id, sample_table
from rl.types import Group

_OFFLINE = ("offline", "dryrun", "disabled")


class WandbRun:
    """Logs metrics against `step`, and samples as tables."""

    requires = "wandb"

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        """`run` is the run's folder, and `config` its configuration without secrets.

        Raises ValueError without a login, and if the service does not answer.
        """
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
                name=run.name,
                id=run_id(run),
                resume="allow",
                dir=run,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
            )
        except Error as error:
            raise ValueError(
                f"log names wandb, which cannot be reached: {error}; WANDB_MODE=offline needs no network"
            ) from None
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Logger`."""
        self._run.log(dict(metrics))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Logger`. Keeps evaluations only: each table is a file, which is too much for every step."""
        if split == "train":
            return
        table = self._table(columns=[*SAMPLE_COLUMNS], data=[[*row] for row in sample_table(groups)])
        self._run.log({f"samples/{split}": table, "step": step})

    def close(self) -> None:
        """See `Logger`."""
        self._run.finish()


def _has_login(wandb: Any) -> bool:
    """Whether a key is in the environment or in the file that `wandb login` writes. Asks for no input."""
    return bool(wandb.api.api_key)
