"""What a run recorded, in the place of its environment: the same groups come at the same steps, and nothing is sampled.

A loop that asks `RecordedEnv` for its problems gets recorded ones, and a rollout of such a problem is what was recorded
of it: tokens, log-probs, versions and reward. So the trainer's side of the loop runs as it did, or with another loss.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.rollouts.serialization import groups_from_rows
from rl.types import Group

_FIELDS = (
    "step",
    "split",
    "problem_id",
    "sample",
    "reward",
    "prompt",
    "truncated",
    "group_failures",
    "metrics",
    "turns",
)


class RecordedProblem:
    """A problem whose rollouts are there already; satisfies `rl.protocols.Problem`."""

    def __init__(self, group: Group) -> None:
        """`group` is what comes of it."""
        self.group = group
        self.id = group.problem_id
        self.prompt = group.prompt

    def start(self) -> Any:
        """Raises AssertionError: `rl.rollouts.episodes.rollout_group` takes the group instead."""
        raise AssertionError("a recorded problem is not attempted again")


class RecordedEnv:
    """The training rollouts of a rollouts.jsonl; satisfies `rl.protocols.Env`. Has no held-out problems."""

    def __init__(self, file: Path, groups_per_step: int) -> None:
        """`groups_per_step` is how many problems the loop asks for in each step.

        Raises ValueError for a file that is no recording, naming the line, and for more groups than that in a step.
        """
        self.file = file
        self.steps = read_recording(file)
        """Step -> its groups, in the order in which they were trained on."""
        self._groups_per_step = groups_per_step
        for step, groups in self.steps.items():
            if len(groups) > groups_per_step:
                raise ValueError(
                    f"step {step} of the recording {file} has {len(groups)} groups; prompts_per_step is "
                    f"{groups_per_step}"
                )

    def __str__(self) -> str:
        """What a configuration's file says of it."""
        return f"recording {self.file}"

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return str(self)

    @property
    def stop(self) -> tuple[str, ...]:
        """Nothing is sampled."""
        return ()

    @property
    def num_steps(self) -> int:
        """The last step that was recorded."""
        return max(self.steps)

    def groups(self) -> Sequence[Group]:
        """All of them, in order."""
        return [group for step in sorted(self.steps) for group in self.steps[step]]

    def train_problems(self, seed: int, start: int, count: int) -> list[RecordedProblem]:
        """Those of a step that were recorded: fewer than `count` where the environment failed all rollouts of a group.

        Raises ValueError for problems of a step behind the last one.
        """
        del seed
        step, index = divmod(start, self._groups_per_step)
        if step >= self.num_steps:
            raise ValueError(f"the recording {self.file} ends with step {self.num_steps}; step {step + 1} is not there")
        return [RecordedProblem(group) for group in self.steps.get(step + 1, [])[index : index + count]]

    def eval_problems(self, count: int) -> list[RecordedProblem]:
        """None: nothing is sampled, so nothing can be evaluated."""
        del count
        return []


def read_recording(file: Path) -> dict[int, list[Group]]:
    """Step -> the groups it trained on. Drops a last line that was never finished.

    Raises ValueError for a file that is not there, for one without training rollouts, and for a line that is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the recording {file} cannot be read: {error.strerror}") from None
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            missing = [name for name in _FIELDS if name not in row]
        except (json.JSONDecodeError, TypeError):
            raise ValueError(f"{file}, line {number}: it is no JSON object") from None
        if missing:
            raise ValueError(f"{file}, line {number}: it has no {missing[0]!r}; a recorded rollout has one")
        if row["split"] == "train":
            rows.setdefault(row["step"], []).append(row)
    if not rows:
        raise ValueError(f"the recording {file} holds no training rollouts")
    return {step: groups_from_rows(of_step) for step, of_step in rows.items()}
