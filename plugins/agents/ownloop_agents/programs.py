"""Programs as episodes: a program runs in a sandbox and talks to the endpoint, and its work has a reward.

    async def reward(task, work, attempt):
        return float((work / "answer.txt").read_text() == task.answer)

    groups = await run_agents(endpoint, Program(["mini", "-t", "{prompt}"]), tasks, reward, num_samples=8)

The program finds the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, and its key in OPENAI_API_KEY and
ANTHROPIC_API_KEY. When it ends, or reaches a limit, its key is refused and its processes are killed; then its work is
scored in the same sandbox.
"""

import asyncio
import inspect
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from ownloop_agents.endpoint import AgentEndpoint
from ownloop_agents.open_session import OpenSession
from ownloop_agents.sessions import EndedBy, ModelCall, Session, SessionGroup
from ownloop_sandbox.sandboxes import Ended, Place, Sandbox, SandboxName, make_sandbox
from rl.checks import check_above_zero, check_at_least
from rl.protocols import Done
from rl.rollouts.episodes import checked_reward

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Something that a program is to do."""

    id: str
    prompt: str = ""
    """What is to be done. It takes the place of `{prompt}` in the program's arguments."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """What lies in the program's folder at the start, by relative names."""
    hidden: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """What is put there for the reward, after the program has ended, such as tests."""
    answer: Any = None
    """For the reward."""

    def start(self) -> NoReturn:
        """Raises TypeError: `run_agents` plays a task, and a loop of rollouts cannot."""
        raise TypeError(f"task {self.id!r} is for a program; train with the loop of ownloop_agents.agent_loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and how long it may run. Its requests are limited by `SessionLimits`."""

    argv: Sequence[str]
    """The command. `{prompt}` in an argument is the task's prompt, and `{base_url}` the endpoint's address with /v1."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables besides PATH, HOME and where the endpoint is; the controller's own are not seen."""
    sandbox: SandboxName = "auto"
    """See `ownloop_sandbox/sandboxes.py`."""
    image: str = ""
    """Of a container."""
    shows: tuple[str, ...] = ()
    """Folders of the host that the program may read, such as its own installation."""
    time_limit_s: float = 300.0
    idle_limit_s: float = 120.0
    """Longest time without a request after the first, while none is being answered."""
    memory_bytes: int | None = None
    """Of one process, or of a container."""
    max_at_once: int = 32
    """How many run at the same time."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if isinstance(self.argv, str) or not self.argv:
            raise ValueError(f"Program.argv is {self.argv!r}; it must be a sequence of the program and its arguments")
        check_above_zero(time_limit_s=self.time_limit_s, idle_limit_s=self.idle_limit_s)
        check_at_least(1, max_at_once=self.max_at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A program that has ended, as its reward sees it."""

    exit_code: int | None
    """None if a limit ended it."""
    output: str
    """The end of its output and errors."""
    calls: tuple[ModelCall, ...]
    run: Callable[[Sequence[str], float], Awaitable[Ended]]
    """Runs a command, for so many seconds at most, in the program's sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A reward with more that a framework says of an episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers to report, under names of their own. The loop averages them over a step, by name."""
    truncated: bool = False
    """Whether a limit of the program's own ended the episode, such as its number of turns."""


Reward = Callable[[AgentTask, Path, Attempt], "float | Scored | Awaitable[float | Scored]"]


@runtime_checkable
class AgentEnv(Protocol):
    """A source of tasks for one program; an `rl.protocols.Env` whose problems are `AgentTask`s."""

    @property
    def program(self) -> Program:
        """What is run on each task."""
        ...

    def train_problems(self, seed: int, start: int, count: int) -> Sequence[AgentTask]:
        """Tasks number `start` to `start + count - 1` of the endless training stream that `seed` selects."""
        ...

    def eval_problems(self, count: int) -> Sequence[AgentTask]:
        """The first `count` held-out tasks. They are the same in every run."""
        ...

    async def reward(self, task: AgentTask, work: Path, attempt: Attempt) -> float | Scored:
        """See `Reward`."""
        ...


def as_agent_env(env: object) -> AgentEnv:
    """The environment. Raises ValueError if it is of another kind."""
    if not isinstance(env, AgentEnv):
        raise ValueError(f"env is a {type(env).__name__}; this loop needs an AgentEnv, which has a program")
    return env


async def exit_code(task: AgentTask, work: Path, attempt: Attempt) -> float:
    """The reward 1 for a program that ended with status 0, otherwise 0."""
    del task, work
    return float(attempt.exit_code == 0)


@dataclass(frozen=True, slots=True)
class Command:
    """The reward 1 if a command ends with status 0 in the program's sandbox, with the task's hidden files there."""

    argv: Sequence[str]
    time_limit_s: float = 60.0

    async def __call__(self, task: AgentTask, work: Path, attempt: Attempt) -> float:
        """See `Reward`."""
        del task, work
        return float((await attempt.run(self.argv, self.time_limit_s)).exit_code == 0)


@dataclass(frozen=True, slots=True)
class RewardFile:
    """The number that a file of the program's folder holds. An attempt without such a file fails."""

    name: str

    async def __call__(self, task: AgentTask, work: Path, attempt: Attempt) -> float:
        """See `Reward`."""
        del task, attempt
        return float((work / self.name).read_text())


async def run_agents(
    endpoint: AgentEndpoint,
    program: Program,
    tasks: Sequence[AgentTask],
    reward: Reward,
    *,
    num_samples: int = 1,
    seed: int | None = None,
    greedy: bool = False,
) -> list[SessionGroup]:
    """`num_samples` attempts of a program at each task, at most `max_at_once` at a time. The groups are in order.

    With `seed`, the attempts have seeds of their own from it on. `greedy` samples the most probable tokens, for an
    evaluation. An attempt that raises, that never asked the model, or whose reward is not finite is a failure of its
    group. Raises ValueError if the sandbox does not work here, before any program starts.
    """
    check_at_least(1, num_samples=num_samples)
    # before the first task: a sandbox that does not work is one error
    make_sandbox(program.sandbox, Place(work=Path(), url="", socket=None, image=program.image))
    places = asyncio.Semaphore(program.max_at_once)

    async def one(index: int, task: AgentTask) -> Session | str:
        # another seed for each attempt
        sampling = replace(endpoint.sampling, seed=None if seed is None else seed + index)
        sampling = replace(sampling, temperature=0.0) if greedy else sampling
        async with places:
            opened = endpoint.begin(f"{task.id}/{index % num_samples}", sampling=sampling)
            try:
                return await _attempt(endpoint, opened, program, task, reward)
            except Exception as error:  # of the sandbox, or of the user's reward
                # a failure of one attempt, which the group reports
                return f"task {task.id!r}: {type(error).__name__}: {error}"
            finally:
                await endpoint.end(opened)

    # attempts of a task are neighbours
    attempts = [(i * num_samples + k, task) for i, task in enumerate(tasks) for k in range(num_samples)]
    async with asyncio.TaskGroup() as running:
        started = [running.create_task(one(index, task)) for index, task in attempts]
    outcomes = [each.result() for each in started]
    return [_group(task, outcomes[index * num_samples : (index + 1) * num_samples]) for index, task in enumerate(tasks)]


def _group(task: AgentTask, outcomes: Sequence[Session | str]) -> SessionGroup:
    return SessionGroup(
        task_id=task.id,
        prompt=task.prompt or task.id,
        sessions=tuple(each for each in outcomes if isinstance(each, Session)),
        failures=tuple(each for each in outcomes if isinstance(each, str)),
    )


async def _attempt(
    endpoint: AgentEndpoint, opened: OpenSession, program: Program, task: AgentTask, reward: Reward
) -> Session:
    """Runs the program once, and scores its work. Every process of it has ended when this returns or raises."""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ownloop-program-"))  # outside the sandbox, which gets only `work`
    place = Place(
        work=folder / "work",
        url=endpoint.url,
        socket=endpoint.socket,
        image=program.image,
        shows=program.shows,
        memory_bytes=program.memory_bytes,
    )
    sandbox = make_sandbox(program.sandbox, place)
    try:
        await sandbox.create()
        for name, content in task.files.items():
            sandbox.put(name, content)
        ended, ended_by = await _run(sandbox, opened, program, task)
        await endpoint.end(opened)  # now the calls are final
        calls = opened.final_calls()
        if not calls:
            raise RuntimeError(f"the program made no finished call (status {ended.exit_code}): {ended.output[-500:]}")
        for name, content in task.hidden.items():  # the program has ended, so it cannot have seen them
            sandbox.put(name, content)

        async def run(argv: Sequence[str], time_limit_s: float) -> Ended:
            return await sandbox.run(argv, program.env, time_limit_s)

        attempt = Attempt(exit_code=ended.exit_code, output=ended.output, calls=calls, run=run)
        scored = await _scored(reward(task, place.work, attempt))
    finally:
        await sandbox.destroy()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # many small files; not on the event loop
    return Session(
        id=opened.id,
        calls=calls,
        sampling=opened.sampling,
        reward=scored.reward,
        metrics=scored.metrics,
        # a limit of the program's own, though it ended well
        ended_by="own_limit" if scored.truncated and ended_by == "exit" else ended_by,
        exit_code=ended.exit_code,
        output=ended.output,
        seconds=time.monotonic() - started,
    )


async def _scored(found: "float | Scored | Awaitable[float | Scored]") -> Scored:
    """What a reward has found. Raises `EnvironmentFailedError` as `checked_reward` does."""
    value = await found if inspect.isawaitable(found) else found  # rewards may be plain functions or coroutines
    scored = value if isinstance(value, Scored) else Scored(reward=float(value))
    checked_reward(Done(reward=scored.reward, metrics=scored.metrics))  # as of any environment
    return scored


async def _run(sandbox: Sandbox, opened: OpenSession, program: Program, task: AgentTask) -> tuple[Ended, EndedBy]:
    """Runs the program until it ends or reaches a limit. Says which."""
    url = sandbox.reach()
    # each argument in turn, so that a prompt may contain `{base_url}`
    given = [argument.replace("{base_url}", f"{url}/v1") for argument in program.argv]
    argv = [argument.replace("{prompt}", task.prompt) for argument in given]
    env = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": opened.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": opened.key,
        **program.env,  # the program's own come last, and may replace these
    }
    running = asyncio.create_task(sandbox.run(argv, env, program.time_limit_s))
    watching = asyncio.create_task(_idle(opened, program.idle_limit_s))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return Ended(exit_code=None, output="it asked nothing for too long"), "idle_limit"
        ended = running.result()
        return ended, opened.ended_by or ("exit" if ended.exit_code is not None else "time_limit")
    finally:
        for each in (running, watching):
            each.cancel()
        # both have ended before the sandbox is destroyed
        await asyncio.gather(running, watching, return_exceptions=True)


async def _idle(opened: OpenSession, limit_s: float) -> None:
    """Returns once the program has asked nothing for so long, while no request of it was being answered."""
    # before the first request the program may prepare for long
    while not opened.num_asked or opened.running or time.monotonic() - opened.last_request < limit_s:
        await asyncio.sleep(min(_LOOK_S, limit_s / 4))
