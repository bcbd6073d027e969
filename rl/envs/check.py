"""What is wrong with an environment, in sentences for its author.

Looks at problems of both splits and plays episodes with answers that no model should give and every model will: empty,
garbage, very long; each alone, once more, and beside another episode of the same problem. It cannot know whether a
reward is the right one.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from rl.protocols import Done, Env, Observation, Prompt
from rl.rollouts.episodes import checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment

_ANSWERS = ("", " \n", "42", "☃ \x00 ~{[<&%$", "no " * 2000)
_ROLES = ("system", "user", "assistant", "tool")
_METHODS = {"train_problems": "(seed, start, count)", "eval_problems": "(count)"}
_NUM_TRAIN, _NUM_EVAL, _NUM_PLAYED = 256, 16, 4
_MAX_TURNS = 100
_NUM_LIMITS = 6
_SLOW_S = 1.0
_STALL_S = 0.2
_Transcript = list[tuple[Any, ...]]


def require_env(env: object) -> None:
    """Raises ValueError naming what an environment lacks to be one (`rl.protocols.Env`)."""
    problems = _missing(env)
    if problems:
        raise ValueError(f"env is a {type(env).__name__}, and {problems[0]}; see rl.protocols.Env")


def check_env(env: Env, *, time_limit_s: float = 10.0) -> list[str]:
    """Findings, none for an environment that loops can use. A call may last `time_limit_s`.

    Takes seconds as a rule; one with slow replies is looked at for six times that limit and no longer. Runs an event
    loop of its own, so it is to be called where none runs.
    """
    findings = _missing(env)
    if findings:
        return findings
    report = _Report()
    train = report.call("train_problems", lambda: env.train_problems(0, 0, _NUM_TRAIN))
    eval_data = report.call("eval_problems", lambda: env.eval_problems(_NUM_EVAL))
    if train is None or eval_data is None:
        return report.findings
    _check_streams(report, env, train, eval_data)
    for split, problems in (("training", train), ("held-out", eval_data)):
        _check_problems(report, split, problems)
    if not report.findings:  # episodes of malformed problems would say the same again
        played = [*train[:_NUM_PLAYED], *eval_data[:_NUM_PLAYED]]
        asyncio.run(_check_episodes(report, played, time_limit_s))
    return report.findings


class _Report:
    """Findings, of each kind the first."""

    def __init__(self) -> None:
        self._by_kind: dict[str, str] = {}

    @property
    def findings(self) -> list[str]:
        return list(self._by_kind.values())

    def add(self, finding: str, kind: str | None = None) -> None:
        """Without a kind, the text itself is one."""
        self._by_kind.setdefault(kind or finding, finding)

    def call(self, name: str, function: Callable[[], Sequence[Any]]) -> Sequence[Any] | None:
        """The problems that a method of the environment returns, or None."""
        start, computed = time.perf_counter(), time.thread_time()
        try:
            problems = list(function())
            _keys(problems)
        except Exception as error:
            self.add(f"{name} raised {type(error).__name__}: {error}")
            return None
        seconds, computed = time.perf_counter() - start, time.thread_time() - computed
        if computed > _SLOW_S or seconds > 5 * _SLOW_S:  # a busy machine takes longer for the same
            self.add(f"{name} took {seconds:.1f} s for {len(problems)} problems, and everything waits for it meanwhile")
        return problems


def _missing(env: object) -> list[str]:
    """What it does not have, or has of a wrong type."""
    if isinstance(env, type):
        return [f"{env.__name__} is a class; an instance of it is needed"]
    found: list[str] = []
    name, stop = getattr(env, "name", None), getattr(env, "stop", None)
    if not isinstance(name, str) or not name:
        found.append(f"its name is {name!r}; a text for readers of the metrics is needed")
    if not isinstance(stop, tuple) or not all(isinstance(s, str) and s for s in stop):  # pyright: ignore[reportUnknownVariableType]
        found.append(f"its stop is {stop!r}; a tuple of non-empty strings is needed, () for none")
    return found + [
        f"it has no method {method}{arguments}"
        for method, arguments in _METHODS.items()
        if not callable(getattr(env, method, None))
    ]


def _check_streams(report: _Report, env: Env, train: Sequence[Any], eval_data: Sequence[Any]) -> None:
    """Counts, repeatability, and that the splits have nothing in common."""
    for name, problems, count in (("train", train, _NUM_TRAIN), ("eval", eval_data, _NUM_EVAL)):
        if len(problems) != count:
            report.add(f"{name}_problems returned {len(problems)} problems when asked for {count}")
    again = report.call("train_problems", lambda: env.train_problems(0, 0, _NUM_TRAIN)) or []
    if _keys(again) != _keys(train):
        report.add("train_problems(0, 0, n) returned other problems the second time; a run could not be repeated")
    part = report.call("train_problems", lambda: env.train_problems(0, 8, 8)) or []
    if _keys(part) != _keys(train)[8:16]:
        report.add(
            "train_problems(0, 8, 8) is not the part from 8 to 16 of train_problems(0, 0, n); a run could not go on"
        )
    other = report.call("train_problems", lambda: env.train_problems(1, 0, _NUM_TRAIN)) or []
    if _keys(other) == _keys(train):
        report.add("train_problems returns the same problems for seeds 0 and 1")
    fewer = report.call("eval_problems", lambda: env.eval_problems(_NUM_EVAL // 2)) or []
    if _keys(fewer) != _keys(eval_data)[: len(fewer)]:
        report.add("eval_problems(n) does not begin with eval_problems(n / 2); evaluations could not be compared")
    if len({key[0] for key in _keys(eval_data)}) < len(eval_data):
        report.add("eval_problems returned an id twice; each held-out problem must be another")
    for what, index in (("id", 0), ("prompt", 1)):
        shared = {key[index] for key in _keys(eval_data)} & {key[index] for key in _keys([*train, *other])}
        if shared:
            report.add(f"training and held-out problems share the {what} {min(shared)[:200]!r}")


def _keys(problems: Sequence[Any]) -> list[tuple[str, str]]:
    return [(str(getattr(p, "id", None)), str(getattr(p, "prompt", None))) for p in problems]


def _check_problems(report: _Report, split: str, problems: Sequence[Any]) -> None:
    """Ids, prompts and the method that starts an episode."""
    prompts: dict[str, str] = {}
    for problem in problems:
        where = f"{split} problem {getattr(problem, 'id', None)!r}"
        if not isinstance(getattr(problem, "id", None), str) or not problem.id:
            report.add(f"the id of a {split} problem is {getattr(problem, 'id', None)!r}; a non-empty text is needed")
            return
        if not callable(getattr(problem, "start", None)):
            report.add(f"{where} is a {type(problem).__name__} without a method start()")
            return
        fault = _prompt_fault(getattr(problem, "prompt", None))
        if fault:
            report.add(f"the prompt of {where} {fault}")
            return
        if prompts.setdefault(problem.id, str(problem.prompt)) != str(problem.prompt):
            report.add(f"the id {problem.id!r} belongs to two different prompts", "id")


def _prompt_fault(prompt: Any) -> str | None:
    """What is wrong with a prompt, or None."""
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list | tuple) or not prompt:
        return f"is {prompt!r}; text, or a list of at least one message, is needed"
    messages: Sequence[Any] = prompt
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:  # pyright: ignore[reportUnknownMemberType]
            return f"holds {message!r}; a message is a dictionary with role and content, both text"
        if message["role"] not in _ROLES:
            return f"has a message of role {message['role']!r}; roles are {', '.join(_ROLES)}"
    return None


async def _check_episodes(report: _Report, problems: Sequence[Any], time_limit_s: float) -> None:
    """Every problem with every answer: alone, once more, and turn by turn beside an episode that goes differently."""
    player = _Player(report, time_limit_s)
    deadline = time.perf_counter() + _NUM_LIMITS * time_limit_s
    for problem in problems:
        alone: dict[str, _Transcript] = {}
        for answer in _ANSWERS:
            if player.given_up or time.perf_counter() > deadline:
                return
            where = _where(problem, answer)
            try:
                (first,) = await player.play(where, problem, answer)
                (second,) = await player.play(where, problem, answer)
            except EnvironmentFailedError as error:
                report.add(f"{where} failed: {error}", str(error).partition(":")[0])
                continue
            if first == second:
                alone[answer] = first
            else:
                report.add(
                    f"{where} went otherwise the second time, {_difference(second, first)}: start() must return a new "
                    "episode, and what it replies may depend on nothing but what it was told; no run could be repeated",
                    "repeated",
                )
        for answer, other in pairwise([*alone, *alone]):
            where = _where(problem, answer)
            try:
                beside, _ = await player.play(where, problem, answer, other)
            except EnvironmentFailedError as error:
                difference = f"where it failed: {error}"
            else:
                difference = _difference(beside, alone[answer]) if beside != alone[answer] else ""
            if difference:
                report.add(
                    f"{where} went otherwise beside another episode, {difference}: episodes share state; start() must "
                    "return an independent one each time",
                    "shared",
                )


def _where(problem: Any, answer: str) -> str:
    return f"problem {problem.id!r}, answered {answer[:20]!r}{'...' * (len(answer) > 20)} each time,"


def _difference(got: _Transcript, expected: _Transcript) -> str:
    """The first turn in which two transcripts differ."""
    turn = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if turn is None:
        return f"with {len(got)} turns instead of {len(expected)}"
    return f"in turn {turn + 1} with {got[turn]!r:.80} instead of {expected[turn]!r:.80}"


class _Player:
    """Plays episodes in which every answer is the same, and notices what costs time."""

    def __init__(self, report: _Report, time_limit_s: float) -> None:
        self._report = report
        self._time_limit_s = time_limit_s
        self._num_replies = self._num_stalls = 0
        self.given_up = False
        """Whether more episodes would only take more time."""

    async def play(self, where: str, problem: Any, *answers: str) -> list[_Transcript]:
        """One episode per answer, all at the same time and turn by turn. Raises `EnvironmentFailedError`."""
        episodes = [await call_environment(problem.start, time_limit_s=self._time_limit_s) for _ in answers]
        transcripts: list[_Transcript] = [[] for _ in answers]
        for episode in episodes:
            if not callable(getattr(episode, "reply", None)):
                raise EnvironmentFailedError(
                    f"start() returned a {type(episode).__name__} without a method reply(completion)"
                )
        going = list(zip(episodes, answers, transcripts, strict=True))
        for _ in range(_MAX_TURNS):
            for episode, answer, transcript in going:
                transcript.append(await self._turn(where, problem, episode, answer))
            going = [one for one in going if one[2][-1][0] != "done"]
            if not going:
                return transcripts
        self._report.add(
            f"{where} did not end within {_MAX_TURNS} turns; only a full context would end such an episode", "endless"
        )
        self.given_up = True
        return transcripts

    async def _turn(self, where: str, problem: Any, episode: Any, answer: str) -> tuple[Any, ...]:
        """What a reply says, in a form that can be compared. Raises `EnvironmentFailedError`."""
        start = time.perf_counter()
        ticker = _Ticker()
        try:
            reply = await call_environment(episode.reply, answer, time_limit_s=self._time_limit_s)
        finally:
            stalled = ticker.stop()
        self._num_replies += 1
        self._num_stalls += stalled > _STALL_S and inspect.iscoroutinefunction(episode.reply)
        if self._num_stalls > max(self._num_replies / 2, 3):  # a busy machine may stall it now and then
            self._report.add(
                f"{where} blocked the event loop for {stalled:.1f} of {time.perf_counter() - start:.1f} s, and with it "
                "all other rollouts; an async reply must await what takes time",
                "blocked",
            )
            self.given_up = True
        reward = checked_reward(reply)
        if isinstance(reply, Done):
            return ("done", reward)
        assert isinstance(reply, Observation)
        _check_observation(problem.prompt, reply.messages)
        return ("observation", reply.messages, reward)


def _check_observation(prompt: Prompt, messages: Prompt) -> None:
    fault = _prompt_fault(messages)
    if fault:
        raise EnvironmentFailedError(f"the observation {fault}")
    if isinstance(prompt, str) != isinstance(messages, str):
        forms = ("messages", "text")
        raise EnvironmentFailedError(
            f"the prompt is {forms[isinstance(prompt, str)]}, the observation {forms[isinstance(messages, str)]}"
        )


class _Ticker:
    """Measures the longest time for which the event loop did not run."""

    def __init__(self) -> None:
        self._longest, self._last = 0.0, time.perf_counter()
        self._task = asyncio.create_task(self._tick())

    def stop(self) -> float:
        """Seconds."""
        self._task.cancel()
        return max(self._longest, time.perf_counter() - self._last)

    async def _tick(self) -> None:
        while True:
            now = time.perf_counter()
            self._longest, self._last = max(self._longest, now - self._last), now
            await asyncio.sleep(0.01)
