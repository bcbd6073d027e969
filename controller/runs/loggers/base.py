"""What every logger does. A run's folder is one: its files are always written."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

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
