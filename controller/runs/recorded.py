"""Replays a run's recorded rollouts: every step gets the groups that it had, and nothing is sampled.

A replay puts `RecordedEnv` in the place of the environment. `controller.runs.rollout_source` then takes a step's groups
from the recording, with their tokens, log-probs, versions and rewards, instead of asking a generator. The trainer's
side of the loop runs as it did in the recorded run, or with another loss.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from controller.runs.recording import TRAINING, recorded_files
from rl.algorithms.shaping import unshaped
from rl.protocols import Problem
from rl.rollouts.columns import count_groups, read_groups
from rl.rollouts.json_lines import read_lines
from rl.types import Group

_NOT_RECORDED = Group(problem_id="", prompt="", rollouts=(), failures=("not recorded",))


class RecordedEnv:
    """The training rollouts of a run. Satisfies `rl.protocols.Env`, but has groups in place of problems."""

    def __init__(self, file: Path, groups_per_step: int, best_reward: float = 1.0) -> None:
        """`file` is as `read_recording` takes it; `groups_per_step` the number of problems that a step asks for.

        `best_reward` is that of the environment that was recorded.
        Raises ValueError if the file is not a recording, and if a step has more groups than that.
        """
        self.file = file
        self.steps = read_recording(file)
        """Step -> its groups, in the order in which they were trained on."""
        self.best_reward = best_reward
        """See `rl.protocols.Env`."""
        self._groups_per_step = groups_per_step
        for step, number in _num_groups(self.steps).items():
            if number > groups_per_step:
                raise ValueError(
                    f"step {step} of the recording {file} has {number} groups; prompts_per_step is {groups_per_step}"
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

    def groups(self) -> Iterator[Group]:
        """The groups of all steps, in order."""
        return (group for step in sorted(self.steps) for group in self.steps[step])

    def train_groups(self, start: int, count: int) -> list[Group]:
        """The groups that problems start to start + count - 1 of the training stream had, all of one step.

        Rewards are those of the environment, which the loop shapes again if it shapes any. A group all of whose
        rollouts failed was not recorded; one without rollouts, at the end of the step, stands for it.
        Raises ValueError for a step after the last one.
        """
        step, index = divmod(start, self._groups_per_step)
        if step >= self.num_steps:
            raise ValueError(f"the recording {self.file} ends with step {self.num_steps}; step {step + 1} is not there")
        groups = [unshaped(group) for group in self.steps.get(step + 1, ())]
        groups += [_NOT_RECORDED] * (self._groups_per_step - len(groups))
        return groups[index : index + count]

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


def read_recording(path: Path) -> Mapping[int, Sequence[Group]]:
    """Step -> the groups that it trained on, of a run's folder `rollouts`, a file of it, or an earlier rollouts.jsonl.

    Raises ValueError if the path is missing or has no training rollouts, and for a file that is not a recording.
    """
    steps = _Steps(path) if path.is_dir() or path.suffix == ".parquet" else read_lines(path)
    if not steps:
        raise ValueError(f"the recording {path} holds no training rollouts")
    return steps


class _Steps(Mapping[int, Sequence[Group]]):
    """Parquet files by step. Holds the groups of one step at a time: those of a long run may not fit into memory."""

    def __init__(self, path: Path) -> None:
        found = recorded_files(path if path.is_dir() else path.parent)
        self._files: dict[int, list[Path]] = {}
        for kind, step, file in found:
            if kind == TRAINING and (path.is_dir() or file == path):
                self._files.setdefault(step, []).append(file)
        if not self._files and not path.exists():
            raise ValueError(f"the recording {path} cannot be read: {os.strerror(errno.ENOENT)}")
        self._last: tuple[int, Sequence[Group]] = (-1, ())

    def __getitem__(self, step: int) -> Sequence[Group]:
        if self._last[0] != step:
            self._last = (step, [group for file in self._files[step] for group in read_groups(file)])
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def num_groups(self) -> dict[int, int]:
        """Step -> the number of its groups; reads one small column of every file."""
        return {step: sum(map(count_groups, files)) for step, files in self._files.items()}


def _num_groups(steps: Mapping[int, Sequence[Group]]) -> dict[int, int]:
    return steps.num_groups() if isinstance(steps, _Steps) else {step: len(steps[step]) for step in steps}
