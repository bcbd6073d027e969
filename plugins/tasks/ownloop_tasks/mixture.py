"""Several environments in one run, each with a weight that may follow a curriculum.

    env=Mixture(
        easy=Task(LargestNumber(count=2), weight=Ramp(((0, 1.0), (200, 0.2)))),
        hard=Task(LargestNumber(count=6), weight=Ramp(((0, 0.2), (200, 1.0)))),
        words=Task(ReadNumbers(), weight=WhileUnsolved(0.9)),
    )

Metrics get the name of the task: `reward_easy` in a step's row and in an evaluation's.
"""

import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Strict

from ownloop_tasks.around import AroundProblem
from rl.configuration import NotNegative, Several, configuration
from rl.data.rows import hashed_number
from rl.protocols import Done, Episode, Problem, ProblemOptions, Prompt, Reply, best_reward_of, given
from rl.rollouts.guard import Environment, time_limit_of

_TAKEN = ("low", "high", "mean", "std")  # `reward_high` is a bound of the whole evaluation's reward
_MEMORY = 0.98  # of a pass rate, from one episode to the next: it is a mean over the last fifty


@dataclass(frozen=True, slots=True)
class Progress:
    """What a weight may depend on."""

    number: int
    """Of the problem in the training stream, from 0. A step takes `prompts_per_step` of them."""
    pass_rate: float
    """Moving mean of the task's rewards in training, as parts of its best reward; 0 before the first. A run that
    resumes measures it anew, so only weights that do not use it are the same in a resumed run."""


Weight = NotNegative | Callable[[Progress], float]


@configuration(kw_only=False)
class Task:
    """An environment of a mixture."""

    env: Environment
    weight: Weight = 1.0
    """How often its problems come, relative to the weights of the other tasks."""


@configuration(kw_only=False)
class Ramp:
    """A weight in straight lines through (problem's number, weight); constant before the first and after the last."""

    points: Several[Annotated[tuple[int, NotNegative], Strict(False)]]

    def __post_init__(self) -> None:
        """Raises ValueError unless the numbers rise."""
        if not self.points or any(first[0] >= second[0] for first, second in itertools.pairwise(self.points)):
            raise ValueError(f"Ramp.points is {self.points}; it needs at least one, with rising numbers")

    def __call__(self, progress: Progress) -> float:
        """The weight at a problem's number."""
        numbers, weights = zip(*self.points, strict=True)
        return float(np.interp(progress.number, numbers, weights))


@configuration(kw_only=False)
class WhileUnsolved:
    """A weight that falls to `afterwards` once the task's pass rate has reached a value."""

    pass_rate: NotNegative
    weight: NotNegative = 1.0
    afterwards: NotNegative = 0.1

    def __call__(self, progress: Progress) -> float:
        """The weight at a pass rate."""
        return self.weight if progress.pass_rate < self.pass_rate else self.afterwards


class Mixture:
    """An environment made of others. Each problem of the training stream is drawn from one task, by the weights.

    The draw for problem i follows from the run's seed, i and the weights, and it is problem i of its task's own stream,
    whose seed follows from the run's and the task's name: so a task's rows come as often as one another on average, not
    each once before any comes again. A task may be a mixture. Held-out problems come from all tasks alike.
    """

    def __init__(self, **tasks: Task) -> None:
        """`tasks` by the name that metrics have. Raises ValueError for tasks that are none or whose answers end at
        different strings, for weights that are all 0, and for a name that makes a metric of every run.
        """
        if len(tasks) < 2:
            raise ValueError(f"a Mixture has {len(tasks)} tasks; it needs at least 2, or use the environment itself")
        for name, task in tasks.items():
            if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance] - it is a recipe's
                raise ValueError(f"Mixture.{name} is {task!r:.200}; it must be a Task")
            if name in _TAKEN or name.removesuffix("_low").removesuffix("_high") in tasks.keys() - {name}:
                raise ValueError(f"Mixture has a task {name!r}; reward_{name} is another metric of the run: rename it")
            if not (best := best_reward_of(task.env)) > 0:  # pass rates are shares of it
                raise ValueError(f"Mixture.{name}: best_reward of {task.env.name!r} is {best}; it must be above 0")
        if all(not callable(task.weight) and task.weight == 0 for task in tasks.values()):
            raise ValueError("the weights of a Mixture are all 0; one must be above 0")
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
        names = list(itertools.islice(itertools.cycle(self.tasks), count))
        of_tasks: dict[str, Iterator[Problem]] = {}
        for name, share in Counter(names).items():
            try:
                problems = self.tasks[name].env.eval_problems(share)
            except ValueError as error:
                raise ValueError(
                    f"Mixture.{name}, of which {share} of {count} held-out problems are: {error}"
                ) from error
            if len(problems) != share:
                raise ValueError(f"Mixture.{name} has {len(problems)} held-out problems; it needs {share} of {count}")
            of_tasks[name] = iter(problems)
        return [_OfTask(name, self.tasks[name], next(of_tasks[name])) for name in names]

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
        own_seed = hashed_number(f"task/{name}/{seed}")  # else a mixture in this one would draw by the same number
        (problem,) = self.tasks[name].env.train_problems(own_seed, number, 1)
        return _OfTask(name, self.tasks[name], problem, self._count)

    def _count(self, name: str, reward: float) -> None:
        """Updates a task's pass rate by the reward of a training episode."""
        share = reward / best_reward_of(self.tasks[name].env)
        self.pass_rates[name] = _MEMORY * self.pass_rates[name] + (1 - _MEMORY) * share


class _OfTask(AroundProblem):
    """A problem that says in its metrics which task it belongs to. It is its own episodes' maker."""

    def __init__(
        self, name: str, task: Task, problem: Problem, count: Callable[[str, float], None] | None = None
    ) -> None:
        self.id = f"{name}: {problem.id}"
        own = given(ProblemOptions, problem)
        self.best_reward = best_reward_of(task.env) if own.best_reward is None else own.best_reward
        self.prompt: Prompt = problem.prompt
        tools = getattr(problem, "tools", None)
        if tools is not None:
            self.tools = tools
        self._task, self.problem, self._count = name, problem, count

    def start(self) -> "Episode | Awaitable[Episode]":
        """See `rl.protocols.Problem`."""
        episode = self.problem.start()
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
