"""Recorded rollouts under another reward, without a generator.

    a run's rollouts/  --episodes, in which recorded turns take the generator's place-->  new rewards
    rows of JSONL      --a function of a row's columns-->                                 new rewards

Tokens, log-probs and policy versions stay as they were recorded, so that a loss on them has the ratios of the policy
that sampled them. An environment that would have shown the model something else than what was recorded cannot grade the
rollout: that counts as a failure of the rollout, and says why.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.handles.offline import OfflineGenerator
from controller.runs.recording import RecordedSteps, recording_of, write_rollouts
from rl.algorithms.shaping import unshaped
from rl.envs.jsonl import JsonlProblem
from rl.images import join_tokens
from rl.lora import Policy
from rl.protocols import Env, Problem
from rl.rollouts.episodes import Player, all_results, checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment
from rl.rollouts.rendering import Renderer, prompt_text
from rl.types import Answer, Completion, Group, Rollout, SamplingParams, Turn

_PROBLEMS_AT_ONCE = 256
_GROUPS_AT_ONCE = 16  # the episodes of so many are open together
_SAMPLING = SamplingParams(max_tokens=1)  # nothing is sampled
_TASK = "reward_"  # begins the metric with the name of a mixture's task


class OtherEpisodeError(Exception):
    """An environment asks the model something else than what was recorded."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A group of a step, as recorded and with its new rewards."""

    step: int
    before: Group
    """As the environment rewarded it, before any shaping. A reward that is not known is NaN."""
    after: tuple[Rollout | str, ...]
    """For each rollout of the group itself with its new reward and metrics, or why it has none."""

    @property
    def group(self) -> Group:
        """The group with its new rewards. Rollouts without one are among its failures."""
        graded = tuple(rollout for rollout in self.after if isinstance(rollout, Rollout))
        return replace(self.before, rollouts=graded, failures=(*self.before.failures, *self.failures))

    @property
    def failures(self) -> tuple[str, ...]:
        """Why rollouts have no new reward."""
        return tuple(said for said in self.after if isinstance(said, str))

    @property
    def pairs(self) -> list[tuple[Rollout, Rollout]]:
        """Each rollout with a new reward: as recorded, and as graded."""
        both = zip(self.before.rollouts, self.after, strict=True)
        return [(old, new) for old, new in both if isinstance(new, Rollout)]

    @property
    def task(self) -> str:
        """The task of a mixture, whose name a metric of each rollout bears; empty for none."""
        rollouts = (*self.group.rollouts, *self.before.rollouts)
        found = ([n.removeprefix(_TASK) for n in sorted(each.metrics) if n.startswith(_TASK)] for each in rollouts)
        return next(("+".join(names) for names in found if names), "")


class Problems:
    """The problems of an environment's training stream, found by id, or else by prompt."""

    def __init__(self, env: Env, seed: int, most: int) -> None:
        """Reads at most the first `most` problems of the stream that `seed` selects."""
        self._env, self._seed, self._most, self._read = env, seed, most, 0
        self._by_id: dict[str, Problem] = {}
        self._by_prompt: dict[str, dict[str, Problem]] = {}

    def of(self, group: Group) -> Problem:
        """The problem of a recorded group. Raises `OtherEpisodeError` if there is none, or several with its prompt."""
        while group.problem_id not in self._by_id and self._read < self._most:
            self._read_on()
        if group.problem_id in self._by_id:
            return self._by_id[group.problem_id]
        alike = self._by_prompt.get(group.prompt, {})
        if len(alike) != 1:
            found = f"{len(alike)} have its prompt: {', '.join(list(alike)[:3])}" if alike else "none has its prompt"
            raise OtherEpisodeError(f"none of the first {self._read} training problems has its id, and {found}")
        return next(iter(alike.values()))

    def _read_on(self) -> None:
        problems = self._env.train_problems(self._seed, self._read, _PROBLEMS_AT_ONCE)
        self._read = self._read + len(problems) if problems else self._most
        for problem in problems:
            self._by_id.setdefault(problem.id, problem)
            self._by_prompt.setdefault(prompt_text(problem.prompt), {}).setdefault(problem.id, problem)


class _Recorded(OfflineGenerator):
    """The turns of one rollout in place of a generator."""

    def __init__(self, rollout: Rollout) -> None:
        self._turns, self.num_answered = rollout.turns, 1  # the first turn is the player's

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """The next recorded answer. Raises `OtherEpisodeError` if its prompt was another, or if there is none."""
        del sampling, num_samples, policy
        number = self.num_answered
        if number == len(self._turns):
            raise OtherEpisodeError(f"it asks for turn {number + 1}; the recorded episode ended after turn {number}")
        earlier = (part for turn in self._turns[:number] for part in (turn.prompt_tokens, turn.completion.tokens))
        if tuple(join_tokens(*earlier, self._turns[number].prompt_tokens)) != tuple(prompt_tokens):
            raise OtherEpisodeError(f"before turn {number + 1} it says something else than what was recorded")
        self.num_answered += 1
        return [self._turns[number].completion]


async def regrade_group(group: Group, problem: Problem, renderer: Renderer, time_limit_s: float) -> Graded:
    """Plays the episodes of a recorded group again, with the recorded answers. The step is 0."""
    tokens = renderer.encode_problem(problem)

    async def one(rollout: Rollout) -> Rollout | str:
        recorded, (first, *_) = _Recorded(rollout), rollout.turns
        try:
            if tuple(tokens) != tuple(first.prompt_tokens):
                raise OtherEpisodeError("its prompt is another than the recorded one, for which the model answered")
            played = await Player(recorded, renderer, _SAMPLING, time_limit_s).play(problem, 0, first)
            if recorded.num_answered < len(rollout.turns):
                turns = f"turn {recorded.num_answered} of {len(rollout.turns)} recorded ones"
                raise OtherEpisodeError(f"it ends the episode after {turns}")
        except OtherEpisodeError as error:
            return f"problem {group.problem_id!r}: {error}"
        if isinstance(played, str):
            return played
        kept = ("reward", "metrics", "out_of_context", "environment_s")
        return replace(rollout, **{name: getattr(played, name) for name in kept})

    return Graded(0, group, tuple(await all_results([one(rollout) for rollout in group.rollouts])))


async def regrade(steps: RecordedSteps, env: Env, seed: int, renderer: Renderer, time_limit_s: float) -> list[Graded]:
    """All groups of a recording under the rewards of `env`, in the order in which they were trained on.

    `seed` is that of the run. Raises ValueError if the environment has none of the recorded problems.
    """
    groups = [(step, unshaped(group)) for step in sorted(steps) for group in steps[step]]
    problems = Problems(env, seed, 4 * len(groups) + 1024)  # a loop may have passed over some

    async def one(step: int, group: Group) -> Graded:
        try:
            problem = problems.of(group)
        except OtherEpisodeError as error:
            return Graded(step, group, (f"problem {group.problem_id!r}: {error}",) * len(group.rollouts))
        return replace(await regrade_group(group, problem, renderer, time_limit_s), step=step)

    graded: list[Graded] = []
    for start in range(0, len(groups), _GROUPS_AT_ONCE):
        graded += await all_results([one(*each) for each in groups[start : start + _GROUPS_AT_ONCE]])
    if not any(each.pairs for each in graded):
        reasons = [said for each in graded for said in each.failures]
        raise ValueError(f"{env.name} can grade none of the recorded rollouts: {reasons[0] if reasons else 'none'}")
    return graded


def write_regraded(graded: Iterable[Graded], folder: Path) -> None:
    """Writes a recording that `ownloop run RECIPE --replay FOLDER` trains on. Raises ValueError if `folder` exists."""
    if folder.exists():
        raise ValueError(f"--out is {folder}, which exists; name a new folder")
    steps: dict[int, list[Group]] = {}
    for each in graded:
        steps.setdefault(each.step, []).append(each.group)
    for step, groups in steps.items():
        write_rollouts(recording_of(folder, step, "step"), groups, step=step, split="train")


async def regrade_rows(
    rows: Sequence[Mapping[str, object]], problems: Sequence[JsonlProblem], time_limit_s: float
) -> list[Graded]:
    """Rows as groups, with the rewards of their problems (`ownloop_doctors.rows`).

    Rows of the same `group`, or else of the same prompt, are a group; `reward` is the old one and `task` names a task.
    """
    groups: dict[str, list[tuple[Mapping[str, Any], JsonlProblem]]] = {}
    for row, problem in zip(rows, problems, strict=True):
        groups.setdefault(str(row.get("group", row["prompt"])), []).append((row, problem))

    async def one(problem: JsonlProblem, rollout: Rollout) -> Rollout | str:
        try:
            reply = await call_environment(problem.reply, Answer.read(rollout.text), time_limit_s=time_limit_s)
            return replace(rollout, reward=checked_reward(reply))
        except EnvironmentFailedError as error:
            return f"{rollout.text[:40]!r}: {error}{error.frames}"

    graded: list[Graded] = []
    for key, members in groups.items():
        first, rollouts = members[0][0], tuple(_rollout(row) for row, _ in members)
        before = Group(problem_id=key[:80], prompt=prompt_text(first["prompt"]), rollouts=rollouts)
        work = [one(problem, rollout) for (_, problem), rollout in zip(members, rollouts, strict=True)]
        graded.append(Graded(int(first.get("step", 0)), before, tuple(await all_results(work))))
    return graded


def _rollout(row: Mapping[str, Any]) -> Rollout:
    """A row as a rollout without tokens."""
    said = Completion(tokens=(), logprobs=(), versions=(), text=str(row["completion"]), finish_reason="stop")
    metrics = {f"{_TASK}{row['task']}": math.nan} if "task" in row else dict[str, float]()
    reward = float(row.get("reward", math.nan))
    return Rollout(turns=(Turn(prompt_tokens=(), completion=said),), reward=reward, metrics=metrics)


def graded_now(work: Any) -> list[Graded]:
    """What a coroutine of this module returns, in an event loop of its own."""
    return asyncio.run(work)
