"""Several environments in one run, each with a weight that may follow a curriculum. An optional part.

    env=Mixture(
        easy=Task(LargestNumber(count=2), weight=Ramp(((0, 1.0), (200, 0.2)))),
        hard=Task(LargestNumber(count=6), weight=Ramp(((0, 0.2), (200, 1.0)))),
        words=Task(ReadNumbers(), weight=WhileUnsolved(0.9)),
    )

Metrics get the name of the task: `reward_easy` in a step's row and in an evaluation's.
"""

import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rl.checks import check_types
from rl.data.rows import hashed_number
from rl.protocols import Done, Env, Episode, Problem, Prompt, Reply, best_reward_of
from rl.rollouts.guard import require_env, time_limit_of

_MEMORY = 0.98  # of a pass rate, from one episode to the next: it is a mean over the last fifty


@dataclass(frozen=True, slots=True)
class Progress:
    """What a weight may depend on."""

    number: int
    """Of the problem in the training stream, from 0. A step takes `prompts_per_step` of them."""
    pass_rate: float
    """Moving mean of the task's rewards in training, as parts of its best reward; 0 before the first. A run that
    resumes measures it anew, so only weights that do not use it are the same in a resumed run."""


Weight = float | Callable[[Progress], float]


@dataclass(frozen=True, slots=True)
class Task:
    """An environment of a mixture."""

    env: Env
    weight: Weight = 1.0
    """How often its problems come, relative to the weights of the other tasks."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """A weight in straight lines through (problem's number, weight); constant before the first and after the last."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless the numbers rise."""
        check_types(self)
        if not self.points or any(first[0] >= second[0] for first, second in pairwise(self.points)):
            raise ValueError(f"Ramp.points is {self.points}; it needs at least one, with rising numbers")

    def __call__(self, progress: Progress) -> float:
        """The weight at a problem's number."""
        numbers, weights = zip(*self.points, strict=True)
        return float(np.interp(progress.number, numbers, weights))


@dataclass(frozen=True, slots=True)
class WhileUnsolved:
    """A weight that falls to `afterwards` once the task's pass rate has reached a value."""

    pass_rate: float
    weight: float = 1.0
    afterwards: float = 0.1

    def __call__(self, progress: Progress) -> float:
        """The weight at a pass rate."""
        return self.weight if progress.pass_rate < self.pass_rate else self.afterwards


class Mixture:
    """An environment made of others. Each problem of the training stream is drawn from one task, by the weights.

    The draw for problem i follows from the run's seed, i and the weights. Held-out problems come from all tasks alike.
    """

    def __init__(self, **tasks: Task) -> None:
        """`tasks` by the name that metrics have. Raises ValueError if answers of the tasks end at different strings."""
        if len(tasks) < 2:
            raise ValueError(f"a Mixture has {len(tasks)} tasks; it needs at least 2, or use the environment itself")
        for name, task in tasks.items():
            require_env(task.env)
            if not callable(task.weight) and task.weight < 0:
                raise ValueError(f"Mixture.{name}.weight is {task.weight}; it must be at least 0")
            if not (best := best_reward_of(task.env)) > 0:  # pass rates are shares of it
                raise ValueError(f"Mixture.{name}: best_reward of {task.env.name!r} is {best}; it must be above 0")
        self.tasks = tasks
        self.pass_rates = dict.fromkeys(tasks, 0.0)
        """See `Progress.pass_rate`."""
        stops = {name: tuple(task.env.stop) for name, task in tasks.items()}
        if len(set(stops.values())) > 1:
            raise ValueError(f"the tasks of a Mixture end answers at {stops}; these must be the same for all")
        self.stop: tuple[str, ...] = next(iter(stops.values()))
        """See `rl.protocols.Env`."""
        self.best_reward = max(best_reward_of(task.env) for task in tasks.values())
        """See `rl.protocols.Env`."""
        self.call_time_limit_s = max(time_limit_of(task.env) for task in tasks.values())
        """See `rl.protocols.Env`."""

    def __repr__(self) -> str:
        """The tasks, as a run records them in its configuration."""
        return f"Mixture({', '.join(f'{name}={task}' for name, task in self.tasks.items())})"

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return "mixture of " + ", ".join(self.tasks)

    def train_problems(self, seed: int, start: int, count: int) -> Sequence[Problem]:
        """See `rl.protocols.Env`. Raises ValueError if all weights are 0."""
        return [self._draw(seed, number) for number in range(start, start + count)]

    def eval_problems(self, count: int) -> Sequence[Problem]:
        """See `rl.protocols.Env`. The tasks take turns."""
        share = -(-count // len(self.tasks))
        of_tasks = [
            [_OfTask(name, each) for each in task.env.eval_problems(share)] for name, task in self.tasks.items()
        ]
        return [problem for in_turn in zip(*of_tasks, strict=True) for problem in in_turn][:count]

    def _draw(self, seed: int, number: int) -> Problem:
        weights = {
            name: task.weight(Progress(number, self.pass_rates[name])) if callable(task.weight) else task.weight
            for name, task in self.tasks.items()
        }
        if not (0 < sum(weights.values()) < math.inf and min(weights.values()) >= 0):  # nor may one be NaN
            raise ValueError(
                f"the weights of a Mixture at problem {number} are {weights}; one must be above 0, none below, and "
                "their sum finite"
            )
        draw = random.Random(hashed_number(f"mixture/{seed}/{number}"))
        (name,) = draw.choices(list(weights), list(weights.values()))
        (problem,) = self.tasks[name].env.train_problems(seed, number, 1)
        return _OfTask(name, problem, self._count)

    def _count(self, name: str, reward: float) -> None:
        """Updates a task's pass rate by the reward of a training episode."""
        share = reward / best_reward_of(self.tasks[name].env)
        self.pass_rates[name] = _MEMORY * self.pass_rates[name] + (1 - _MEMORY) * share


class _OfTask:
    """A problem that says in its metrics which task it belongs to. It is its own episodes' maker."""

    def __init__(self, task: str, problem: Problem, count: Callable[[str, float], None] | None = None) -> None:
        self.id = f"{task}: {problem.id}"
        self.prompt: Prompt = problem.prompt
        tools: Sequence[Mapping[str, Any]] | None = getattr(problem, "tools", None)
        if tools is not None:
            self.tools = tools
        self._task, self._problem, self._count = task, problem, count

    def start(self) -> "Episode | Awaitable[Episode]":
        """See `rl.protocols.Problem`."""
        episode = self._problem.start()
        return self._started_later(episode) if inspect.isawaitable(episode) else _Episode(episode, self._finished)

    async def _started_later(self, episode: Awaitable[Episode]) -> Episode:
        return _Episode(await episode, self._finished)

    def _finished(self, reply: Reply) -> Reply:
        """The reply with the task's own reward among its metrics, if it ends the episode."""
        if not isinstance(reply, Done):
            return reply
        if self._count is not None:
            self._count(self._task, reply.reward)
        return replace(reply, metrics={**reply.metrics, f"reward_{self._task}": reply.reward})


class _Episode:
    """An episode whose last reply goes through a function."""

    def __init__(self, episode: Episode, finished: Callable[[Reply], Reply]) -> None:
        self._episode, self._finished = episode, finished

    def reply(self, completion: str) -> Reply | Awaitable[Reply]:
        """See `rl.protocols.Episode`."""
        reply = self._episode.reply(completion)
        return self._replied_later(reply) if inspect.isawaitable(reply) else self._finished(reply)

    async def _replied_later(self, reply: Awaitable[Reply]) -> Reply:
        return self._finished(await reply)
