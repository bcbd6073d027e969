"""Replays a run's recorded rollouts: every step gets the groups that it had, and nothing is sampled.

A replay puts `RecordedEnv` in the place of the environment. `controller.runs.rollout_source` then takes a step's groups
from the recording, with their tokens, log-probs, versions and rewards, instead of asking a generator. The trainer's
side of the loop runs as it did in the recorded run, or with another loss.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data.rows import no_fault, parse_row
from rl.protocols import Problem
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


class RecordedEnv:
    """The training rollouts of a rollouts.jsonl. Satisfies `rl.protocols.Env`, but has groups in place of problems."""

    def __init__(self, file: Path, groups_per_step: int) -> None:
        """`groups_per_step` is the number of problems that the loop asks for in each step.

        Raises ValueError if the file is not a recording, naming the line, or if a step has more groups than that.
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
        """The entry in a run's config file."""
        return f"recording {self.file}"

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return str(self)

    @property
    def stop(self) -> tuple[str, ...]:
        """None, because nothing is sampled."""
        return ()

    @property
    def num_steps(self) -> int:
        """The last step that was recorded."""
        return max(self.steps)

    def groups(self) -> Sequence[Group]:
        """The groups of all steps, in order."""
        return [group for step in sorted(self.steps) for group in self.steps[step]]

    def train_groups(self, start: int, count: int) -> list[Group]:
        """The groups that problems start to start + count - 1 of the training stream had, all of one step.

        There are fewer than `count` if all rollouts of a group failed: such a group is not recorded.
        Raises ValueError for a step after the last one.
        """
        step, index = divmod(start, self._groups_per_step)
        if step >= self.num_steps:
            raise ValueError(f"the recording {self.file} ends with step {self.num_steps}; step {step + 1} is not there")
        return self.steps.get(step + 1, [])[index : index + count]

    def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Raises ValueError: recorded problems cannot be attempted again, so a loop has to use `train_groups`."""
        del seed, start, count
        raise ValueError(
            f"the recording {self.file} has no problems to attempt; a loop that can be replayed samples through "
            "`RolloutSource`"
        )

    def eval_problems(self, count: int) -> list[Problem]:
        """None: nothing is sampled, so nothing can be evaluated."""
        del count
        return []


def read_recording(file: Path) -> dict[int, list[Group]]:
    """Step -> the groups that it trained on. A last line without line break is dropped: the run was killed writing it.

    Raises ValueError if the file is missing or has no training rollouts, and for a line that is not a recorded rollout.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the recording {file} cannot be read: {error.strerror}") from None
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        row = parse_row(line, f"{file}:{number}", dict.fromkeys(_FIELDS, no_fault))
        if row["split"] == "train":
            rows.setdefault(row["step"], []).append(row)
    if not rows:
        raise ValueError(f"the recording {file} holds no training rollouts")
    return {step: groups_from_rows(step_rows) for step, step_rows in rows.items()}
