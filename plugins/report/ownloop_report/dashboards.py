"""What dashboards show of a run beside its metrics."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from controller.runs.folder import CUT_OFF, METRICS
from controller.runs.metric_rows import metric_rows
from rl.types import Group

_NUM_SAMPLES = 8
SAMPLE_COLUMNS = ("prompt", "answer", "reward")


def sample_table(groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    """(prompt, answer, reward) of the first rollout of the first groups: what a dashboard shows of a step."""
    first = [(group.prompt, group.rollouts[0]) for group in groups if group.rollouts][:_NUM_SAMPLES]
    return [(prompt, rollout.text, float(rollout.reward)) for prompt, rollout in first]


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """A row under names that dashboards show in groups: `train/`, `eval/` and `time/`; `step` stays as it is."""
    return {_grouped(name): value for name, value in metrics.items()}


def _grouped(name: str) -> str:
    for start, group in (("eval_", "eval"), ("seconds_", "time")):
        if name.startswith(start):
            return f"{group}/{name.removeprefix(start)}"
    return name if name == "step" else f"train/{name}"


class SentAlready:
    """The steps and evaluations that a dashboard has from before a run was resumed, and that are done again.

    A dashboard that cannot take a value back keeps the first; the run's own files have the second.
    """

    def __init__(self, run: Path) -> None:
        """Reads the rows that a resumed run has cut off its metrics."""
        files = (run / CUT_OFF).glob(f"*/{METRICS}")
        self._rows = {_which(row) for file in files for row in metric_rows(file)}

    def __contains__(self, row: object) -> bool:
        """Whether a row of metrics is of such a step or evaluation."""
        return isinstance(row, Mapping) and _which(cast("Mapping[str, float]", row)) in self._rows


def _which(row: Mapping[str, float]) -> tuple[float, bool]:
    return row["step"], "seconds_step" in row


def run_id(run: Path) -> str:
    """The id under which a dashboard knows a run; kept in its folder, so that a resumed run has the same."""
    file = run / "dashboard_id"
    if not file.is_file():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
