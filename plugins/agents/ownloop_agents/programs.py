"""Programs as episodes: a program runs in a sandbox and talks to the endpoint, and its work has a reward.

    async def reward(task, work, attempt):
        return float((work / "answer.txt").read_text() == task.answer)  # `work` is a `Work`, which follows no link

    groups = await run_agents(endpoint, Program(["mini", "-t", "{prompt}"]), tasks, reward, num_samples=8)

The program finds the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, and its key in OPENAI_API_KEY and
ANTHROPIC_API_KEY. When it ends, or reaches a limit, its key is refused, its processes are killed, and the files of its
folder are read. Then its sandbox ends. Commands of the reward run in fresh ones.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Protocol, runtime_checkable

from ownloop_agents.endpoint import AgentEndpoint
from ownloop_agents.open_session import OpenSession
from ownloop_agents.rewards import Calls, Command, RewardFile, exit_code
from ownloop_agents.sessions import EndedBy, ModelCall, Session, SessionGroup
from ownloop_sandbox.sandboxes import Box, BoxConfig, Ended, SandboxName, Work, check_sandbox, make_sandbox
from rl.checks import check_above_zero, check_at_least
from rl.protocols import Done
from rl.rollouts.episodes import checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment, waiting

__all__ = (
    "AgentEnv",
    "AgentTask",
    "Attempt",
    "Calls",
    "Command",
    "Program",
    "Reward",
    "RewardFile",
    "Scored",
    "as_agent_env",
    "exit_code",
    "run_agents",
)
_LOOK_S = 0.2
_ARGUMENT_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN of man 2 execve, with its last 0
_STEERING = ("conftest.py", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py")
_STEERS_PYTEST = re.compile(r"\.?pytest\.(ini|toml)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Something that a program is to do."""

    id: str
    prompt: str = ""
    """What is to be done. It takes the place of `{prompt}` in the program's arguments."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """What lies in the program's folder at the start, by relative names."""
    hidden: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """What commands of the reward find there besides, such as tests. The program never sees them."""
    kept: tuple[str, ...] = ()
    """What commands of the reward find as the program left it, besides the names of `files`: further names, and
    folders, which end with "/"; "./" is all. Files that steer pytest or Python, such as conftest.py, are as in `files`.
    """
    answer: Any = None
    """The right answer, which the reward may read."""

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
    """The image of a container."""
    shows: tuple[str, ...] = ()
    """Folders of the host that the program may read, such as its own installation."""
    time_limit_s: float = 300.0
    idle_limit_s: float = 120.0
    """Longest time without a request after the first, while none is being answered."""
    reward_time_limit_s: float = 600.0
    """How long the reward may take, without the commands that it runs: they have limits of their own."""
    memory_bytes: int = 4 << 30
    """Of all its processes and files together, and of each process. `local`: of each process alone."""
    disk_bytes: int = 1 << 30
    """Of all its files, which are kept in memory. `local`: of each file."""
    max_processes: int = 256
    """Processes and threads. Not limited by `local`."""
    max_at_once: int = 32
    """How many run at the same time."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if isinstance(self.argv, str) or not self.argv:
            raise ValueError(f"Program.argv is {self.argv!r}; it must be a sequence of the program and its arguments")
        limits = {name: getattr(self, name) for name in ("time_limit_s", "idle_limit_s", "reward_time_limit_s")}
        check_above_zero(**limits)
        check_at_least(1, max_at_once=self.max_at_once)
        self.box_config()

    def box_config(self, url: str = "", socket: Path | None = None) -> BoxConfig:
        """Its place in a sandbox. Raises ValueError for limits that make no sense."""
        return BoxConfig(
            url=url,
            socket=socket,
            image=self.image,
            shows=self.shows,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            num_processes=self.max_processes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A program that has ended, as its reward sees it."""

    exit_code: int | None
    """None if a limit ended it."""
    output: str
    """The end of its output and errors."""
    calls: tuple[ModelCall, ...]
    run: Callable[..., Awaitable[Ended]]
    """`await run(argv, seconds)` runs a command in a fresh sandbox without a network, with the files that the task
    names, its hidden ones, and another HOME. `said=` is its standard input. Raises `BoxError` if it cannot be started.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A reward with more that a framework says of an episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers to report, under names of their own. The loop averages them over a step, by name."""
    truncated: bool = False
    """Whether a limit of the program's own ended the episode, such as its number of turns."""


Reward = Callable[[AgentTask, Work, Attempt], "float | Scored | Awaitable[float | Scored]"]


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

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> float | Scored:
        """See `Reward`."""
        ...


def as_agent_env(env: object) -> AgentEnv:
    """The environment. Raises ValueError if it is of another kind."""
    if not isinstance(env, AgentEnv):
        raise ValueError(f"env is a {type(env).__name__}; this loop needs an AgentEnv, which has a program")
    return env


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
    await asyncio.to_thread(check_sandbox, program.sandbox, program.image)
    places = asyncio.Semaphore(program.max_at_once)

    async def one(index: int, task: AgentTask) -> Session | str:
        # another seed for each attempt
        sampling = replace(endpoint.sampling, seed=None if seed is None else seed + index)
        sampling = replace(sampling, temperature=0.0) if greedy else sampling
        async with places:
            opened = endpoint.begin(f"{task.id}/{index % num_samples}", sampling=sampling)
            try:
                return await _attempt(endpoint, opened, program, task, reward)
            except EnvironmentFailedError as error:  # of the user's reward
                return f"task {task.id!r}: {error}{error.frames}"
            except Exception as error:  # of the sandbox
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
    sandbox = make_sandbox(program.sandbox, program.box_config(endpoint.url, endpoint.socket))
    try:
        await sandbox.create()
        for name, content in task.files.items():
            await sandbox.put(name, content)
        ended, ended_by = await _run(sandbox, endpoint.url, opened, program, task)
        await endpoint.end(opened)  # now the calls are final
        calls = opened.final_calls()
        if not calls:
            raise RuntimeError(f"the program made no finished call (status {ended.exit_code}): {ended.output[-500:]}")
        await sandbox.stop()
        work = await sandbox.files()
    finally:
        await sandbox.destroy()
    with contextlib.closing(work):
        run = partial(_in_a_fresh_sandbox, program, task, work)
        attempt = Attempt(exit_code=ended.exit_code, output=ended.output, calls=calls, run=run)
        found = await call_environment(reward, task, work, attempt, time_limit_s=program.reward_time_limit_s)
        scored = found if isinstance(found, Scored) else Scored(reward=float(found))
        checked_reward(Done(reward=scored.reward, metrics=scored.metrics))  # as of any environment
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


async def _in_a_fresh_sandbox(
    program: Program, task: AgentTask, work: Work, argv: Sequence[str], time_limit_s: float, *, said: str = ""
) -> Ended:
    """See `Attempt.run`."""
    sandbox = make_sandbox(program.sandbox, program.box_config())
    with waiting():  # making the sandbox and ending it have limits of their own, too
        try:
            await sandbox.create()
            for name in work.names:
                if _is_copied(task, name):
                    with contextlib.suppress(ValueError):  # too big to be read, as the program left it
                        await sandbox.put(name, work.read(name), mode=work.mode(name) | 0o400)
            given = {name: content for name, content in task.files.items() if _steers(name)}
            for name, content in {**given, **task.hidden}.items():
                await sandbox.put(name, content)
            return await sandbox.run(argv, {"HOME": sandbox.home, **program.env}, time_limit_s, said=said)
        finally:
            await sandbox.destroy()


def _is_copied(task: AgentTask, name: str) -> bool:
    """Whether commands of a reward find a file as the program left it."""
    folders = [each for each in task.kept if each.endswith("/")]
    named = {*task.files, *task.kept}
    if name not in named and "./" not in folders and not name.startswith(tuple(folders)):
        return False
    # a package or an extension module of a test's name would be imported in its place
    stems = [each.removesuffix(".py") for each in task.hidden]
    return not _steers(name) and not name.startswith(tuple(f"{stem}{end}" for stem in stems for end in "/."))


def _steers(name: str) -> bool:
    """Whether pytest or Python would do as the file says without having been asked."""
    path = PurePosixPath(name)
    steers = path.name in _STEERING or _STEERS_PYTEST.fullmatch(path.name) is not None
    return steers or path.suffix in (".pth", ".pyc") or "__pycache__" in path.parts


async def _run(sandbox: Box, url: str, opened: OpenSession, program: Program, task: AgentTask) -> tuple[Ended, EndedBy]:
    """Runs the program until it ends or reaches a limit. Says which."""
    # each argument in turn, so that a prompt may contain `{base_url}`
    given = [argument.replace("{base_url}", f"{url}/v1") for argument in program.argv]
    argv = [argument.replace("{prompt}", task.prompt) for argument in given]
    if (size := max(len(argument.encode()) for argument in argv)) > _ARGUMENT_BYTES:
        raise ValueError(
            f"an argument of the program has {size} bytes with its prompt, and Linux takes {_ARGUMENT_BYTES}; give the "
            "prompt as one of AgentTask.files"
        )
    env = {
        "HOME": sandbox.work,
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
