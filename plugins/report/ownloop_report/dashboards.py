"""What dashboards show of a run beside its metrics."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from rl.types import Group

_NUM_SAMPLES = 8
SAMPLE_COLUMNS = ("prompt", "answer", "reward")


def sample_table(groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    """(prompt, answer, reward) of the first rollout of the first groups: what a dashboard shows of a step."""
    first = [(group.prompt, group.rollouts[0]) for group in groups if group.rollouts][:_NUM_SAMPLES]
    return [(prompt, rollout.text, float(rollout.reward)) for prompt, rollout in first]


def run_id(run: Path) -> str:
    """The id under which a dashboard knows a run; kept in its folder, so that a resumed run has the same."""
    file = run / "dashboard_id"
    if not file.is_file():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
