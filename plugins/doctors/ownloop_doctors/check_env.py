"""Finds mistakes in an environment and reports them as sentences for its author.

Checks the problems of both splits, then plays episodes: every problem with every answer three times, which are alone,
alone again, and turn by turn with an episode that is given another answer. If the first two differ, no run could be
repeated; if only the third differs, episodes share state. Replies that block the event loop are found as well. A
problem's own `answer` must have the best reward and its `wrong_answers` less, none may have more, and not every answer
the same. Whether other rewards are right cannot be known.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from rl.checks import prompt_fault
from rl.data.rows import spaced_alike
from rl.protocols import Done, Env, Observation, ProblemOptions, Prompt, best_reward_of, given
from rl.rollouts.episodes import checked_reward
from rl.rollouts.guard import EnvironmentFailedError, call_environment, missing_of, time_limit_of

ROLES = ("system", "user", "assistant", "tool")
_NUM_TRAIN, _NUM_EVAL = 256, 16  # many training problems, because leaks between the splits are found by chance
_NUM_PLAYED = 4  # problems of each split
_TIME_LIMIT_S = 10.0  # of a call; shorter than that of a run, because the author waits
_SLOW_S = 1.0  # seconds of CPU time for one call of train_problems or eval_problems
# Every environment gets such answers from a model sooner or later: nothing, an attempt, garbage, endless repetition.
_ANSWERS = ("", " \n", "42", "☃ \x00 ~{[<&%$", "no " * 2000)
_MAX_TURNS = 100
_NUM_LIMITS = 6  # the whole check may take this many times the limit of one call
_STALL_S = 0.2  # a coroutine that blocks the event loop for longer is counted
_Transcript = list[tuple[object, ...]]


class Findings:
    """A list of sentences for the environment's author: the first finding of each kind."""

    def __init__(self) -> None:
        """There are none yet."""
        self._by_kind: dict[str, str] = {}

    @property
    def sentences(self) -> list[str]:
        """All findings, in the order in which they were added."""
        return list(self._by_kind.values())

    def add(self, finding: str, kind: str | None = None) -> None:
        """Adds a finding unless there is one of this kind. Without `kind`, only an equal finding is left out."""
        self._by_kind.setdefault(kind or finding, finding)


def check_env(env: Env, *, time_limit_s: float | None = None) -> list[str]:
    """One sentence for each mistake; an empty list for an environment that loops can use.

    A call of the environment may last `time_limit_s`: by default the environment's own `call_time_limit_s`, or 10 s.
    The whole check usually takes seconds, and at most about six times the limit. It runs an event loop of its own, so
    it must not be called from a coroutine.
    """
    missing = missing_of(env)
    if missing:
        return missing
    findings = Findings()
    train = _call(findings, "train_problems", lambda: env.train_problems(0, 0, _NUM_TRAIN))
    evals = _call(findings, "eval_problems", lambda: env.eval_problems(_NUM_EVAL))
    if train is None or evals is None:
        return findings.sentences
    _check_streams(findings, env, train, evals)
    for side, problems in (("training", train), ("held-out", evals)):
        _check_problems(findings, side, problems)
    if time_limit_s is None:
        time_limit_s = time_limit_of(env) if hasattr(env, "call_time_limit_s") else _TIME_LIMIT_S
    if not findings.sentences:  # episodes of malformed problems would give the same findings again
        problems = [*train[:_NUM_PLAYED], *evals[:_NUM_PLAYED]]
        asyncio.run(check_episodes(findings, problems, time_limit_s, best_reward_of(env)))
    return findings.sentences


def _call(
    findings: Findings, name: str, method: Callable[[], Sequence[object]], *, may_repeat: bool = True
) -> Sequence[object] | None:
    """The problems that a method of the environment returns; None if it raises."""
    start, computed = time.perf_counter(), time.thread_time()
    try:
        problems = list(method())
        _keys(problems)  # id and prompt may be properties that raise
    except Exception as error:
        findings.add(f"{name} raised {type(error).__name__}: {error}")
        return None
    seconds, computed = time.perf_counter() - start, time.thread_time() - computed
    # Wall-clock time alone may be the fault of a busy machine, so it has a limit five times as high, or of a machine
    # that was paused, so it is measured again.
    if may_repeat and computed <= _SLOW_S and seconds > 5 * _SLOW_S:
        return _call(findings, name, method, may_repeat=False)
    if computed > _SLOW_S or seconds > 5 * _SLOW_S:
        findings.add(f"{name} took {seconds:.1f} s for {len(problems)} problems, during which the whole loop waits")
    return problems


def _check_streams(findings: Findings, env: Env, train: Sequence[object], evals: Sequence[object]) -> None:
    """Checks the numbers of problems, repeatability, and that no problem is in both splits."""
    for name, problems, count in (("train", train, _NUM_TRAIN), ("eval", evals, _NUM_EVAL)):
        if len(problems) != count:
            findings.add(f"{name}_problems returned {len(problems)} problems when asked for {count}")
    again = _call(findings, "train_problems", lambda: env.train_problems(0, 0, _NUM_TRAIN)) or []
    if _keys(again) != _keys(train):
        findings.add("train_problems(0, 0, n) returned other problems the second time; a run could not be repeated")
    part = _call(findings, "train_problems", lambda: env.train_problems(0, 8, 8)) or []
    if _keys(part) != _keys(train)[8:16]:
        findings.add(
            "train_problems(0, 8, 8) is not the part from 8 to 16 of train_problems(0, 0, n); no run could be resumed"
        )
    other = _call(findings, "train_problems", lambda: env.train_problems(1, 0, _NUM_TRAIN)) or []
    if _keys(other) == _keys(train):
        findings.add("train_problems returns the same problems for seeds 0 and 1")
    fewer = _call(findings, "eval_problems", lambda: env.eval_problems(_NUM_EVAL // 2)) or []
    if _keys(fewer) != _keys(evals)[: len(fewer)]:
        findings.add("eval_problems(n) does not begin with eval_problems(n / 2); evaluations could not be compared")
    if len({key[0] for key in _keys(evals)}) < len(evals):
        findings.add("eval_problems returned an id twice; all held-out problems must be different")
    for what, index in (("id", 0), ("prompt", 1)):
        sides = (_keys(evals, spaced_alike), _keys([*train, *other], spaced_alike))  # white space makes no prompt new
        shared = set[str].intersection(*({key[index] for key in keys} for keys in sides))
        if shared:
            findings.add(f"training and held-out problems share the {what} {min(shared)[:200]!r}")


def _keys(problems: Sequence[object], read: Callable[[object], object] = str) -> list[tuple[str, str]]:
    """(id, prompt) of each problem as text. Missing attributes are reported later, by `_check_problems`."""
    return [(str(getattr(p, "id", None)), str(read(getattr(p, "prompt", None)))) for p in problems]


def _check_problems(findings: Findings, side: str, problems: Sequence[Any]) -> None:
    """Checks ids, prompts and `start`. Stops at the first malformed problem, because the others will be like it."""
    prompts: dict[str, str] = {}
    for problem in problems:
        where = f"{side} problem {getattr(problem, 'id', None)!r}"
        if not isinstance(getattr(problem, "id", None), str) or not problem.id:
            findings.add(f"the id of a {side} problem is {getattr(problem, 'id', None)!r}; a non-empty text is needed")
            return
        if not callable(getattr(problem, "start", None)):
            findings.add(f"{where} is a {type(problem).__name__} without a method start()")
            return
        fault = message_fault(getattr(problem, "prompt", None))
        if fault:
            findings.add(f"the prompt of {where} {fault}")
            return
        if prompts.setdefault(problem.id, str(problem.prompt)) != str(problem.prompt):
            findings.add(f"the id {problem.id!r} belongs to two different prompts", "id")


def message_fault(prompt: Any) -> str:
    """What is wrong with a prompt or an observation; "" if nothing is. Stricter than `prompt_fault`: it knows roles."""
    fault = prompt_fault(prompt)
    if fault or isinstance(prompt, str):
        return fault
    messages: Sequence[Any] = prompt
    unknown = [message["role"] for message in messages if message["role"] not in ROLES]
    return f"has a message of role {unknown[0]!r}; roles are {', '.join(ROLES)}" if unknown else ""


async def check_episodes(findings: Findings, problems: Sequence[object], time_limit_s: float, best: float) -> None:
    """Plays episodes of these problems and adds what went wrong. `time_limit_s` is the limit of one call.

    `best` is the environment's best reward.

    An environment with slow replies is checked for six times that limit and no longer.
    """
    player, rewards = _Player(findings, time_limit_s), _Rewards(findings, best)
    deadline = time.perf_counter() + _NUM_LIMITS * time_limit_s
    for problem in problems:
        alone: dict[str, _Transcript] = {}
        for answer in dict.fromkeys((*_ANSWERS, *_known_answers(problem))):
            if player.given_up or time.perf_counter() > deadline:
                return
            where = _where(problem, answer)
            try:
                (first,) = await player.play(where, problem, answer)
                (second,) = await player.play(where, problem, answer)
            except EnvironmentFailedError as error:
                findings.add(f"{where} failed: {error}", str(error).partition(":")[0])
                continue
            if first == second:
                alone[answer] = first
                rewards.add(where, problem, answer, first[-1])
            else:
                findings.add(
                    f"{where} went differently the second time, {_difference(second, first)}: start() must return a "
                    "new episode, whose replies depend on the completions alone; otherwise no run could be repeated",
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
                findings.add(
                    f"{where} went differently beside another episode, {difference}: episodes share state; start() "
                    "must return an independent episode each time",
                    "shared",
                )

    rewards.check_constant()


def _known_answers(problem: object) -> list[str]:
    """A right answer and a wrong one, as far as the problem has such texts."""
    known = (given(ProblemOptions, problem).answer, *tuple(given(ProblemOptions, problem).wrong_answers)[:1])
    return [answer for answer in known if isinstance(answer, str) and answer]


class _Rewards:
    """The rewards of all answers that were played to the end."""

    def __init__(self, findings: Findings, best: float) -> None:
        self._findings, self._best = findings, best
        self._seen, self._knows_answers = set[float](), False

    def add(self, where: str, problem: object, answer: str, last: tuple[Any, ...]) -> None:
        """Adds a finding for a reward above the best, or one that a right or wrong answer should not have."""
        if last[0] != "done":
            return
        own = given(ProblemOptions, problem)
        reward, best = float(last[1]), float(self._best if own.best_reward is None else own.best_reward)
        slack = 1e-6 * max(1.0, abs(best))
        self._seen.add(reward)
        if reward > best + slack:
            self._findings.add(f"{where} had reward {reward:g}, above best_reward, which is {best:g}", "above")
        if answer == own.answer:
            self._knows_answers = True
            if reward < best - slack:
                told = f"the problem's own answer had reward {reward:g}, below best_reward, which is {best:g}"
                self._findings.add(f"{where}: {told}: the best reward is never reached, or the answer is wrong", "best")
        elif answer in own.wrong_answers and reward >= best - slack:
            self._findings.add(f"{where}, which is one of its wrong_answers, had the best reward, {best:g}", "wrong")

    def check_constant(self) -> None:
        """Adds a finding if all answers had the same reward, unless it is 0 and no right answer is known."""
        if len(self._seen) == 1 and (self._knows_answers or self._seen != {0.0}):
            (reward,) = self._seen
            self._findings.add(f"every answer that was played had reward {reward:g}: there is nothing to learn from it")


def _where(problem: Any, answer: str) -> str:
    return f"problem {problem.id!r}, answered {answer[:20]!r}{'...' * (len(answer) > 20)} each time,"


def _difference(got: _Transcript, expected: _Transcript) -> str:
    """Describes the first turn in which two transcripts differ."""
    turn = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if turn is None:
        return f"with {len(got)} turns instead of {len(expected)}"
    return f"in turn {turn + 1} with {got[turn]!r:.80} instead of {expected[turn]!r:.80}"


class _Player:
    """Plays episodes that get the same answer in every turn; adds a finding for endless or blocking ones."""

    def __init__(self, findings: Findings, time_limit_s: float) -> None:
        self._findings = findings
        self._time_limit_s = time_limit_s
        self._num_replies = self._num_stalls = 0
        self.given_up = False
        """Whether an episode was so slow that further ones would only waste time."""

    async def play(self, where: str, problem: Any, *answers: str) -> list[_Transcript]:
        """Plays one episode per answer, the first turn of each before the second. Raises `EnvironmentFailedError`."""
        episodes = [await call_environment(problem.start, time_limit_s=self._time_limit_s) for _ in answers]
        transcripts: list[_Transcript] = [[] for _ in answers]
        for episode in episodes:
            if not callable(getattr(episode, "reply", None)):
                raise EnvironmentFailedError(
                    f"start() returned a {type(episode).__name__} without a method reply(completion)"
                )
        running = list(zip(episodes, answers, transcripts, strict=True))
        for _ in range(_MAX_TURNS):
            for episode, answer, transcript in running:
                transcript.append(await self._turn(where, problem, episode, answer))
            running = [(e, a, transcript) for e, a, transcript in running if transcript[-1][0] != "done"]
            if not running:
                return transcripts
        self._findings.add(
            f"{where} did not end within {_MAX_TURNS} turns; only a full context would end such an episode", "endless"
        )
        self.given_up = True
        return transcripts

    async def _turn(self, where: str, problem: Any, episode: Any, answer: str) -> tuple[object, ...]:
        """Plays a turn. Returns the reply as a tuple that can be compared. Raises `EnvironmentFailedError`."""
        start = time.perf_counter()
        ticker = _Ticker()
        try:
            reply = await call_environment(episode.reply, answer, time_limit_s=self._time_limit_s)
        finally:
            stalled = ticker.stop()
        self._num_replies += 1
        self._num_stalls += stalled > _STALL_S and inspect.iscoroutinefunction(episode.reply)
        # A busy machine stalls the event loop now and then, so a few stalls are no finding.
        if self._num_stalls > max(self._num_replies / 2, 3):
            self._findings.add(
                f"{where} blocked the event loop for {stalled:.1f} of {time.perf_counter() - start:.1f} s, and with it "
                "all other rollouts; an async reply must await everything that takes time",
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
    fault = message_fault(messages)
    if fault:
        raise EnvironmentFailedError(f"the observation {fault}")
    if isinstance(prompt, str) != isinstance(messages, str):
        forms = ("messages", "text")
        raise EnvironmentFailedError(
            f"the prompt is {forms[isinstance(prompt, str)]}, the observation {forms[isinstance(messages, str)]}"
        )


class _Ticker:
    """Measures the longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self._longest, self._last = 0.0, time.perf_counter()
        self._task = asyncio.create_task(self._tick())

    def stop(self) -> float:
        """Stops and returns that time in seconds."""
        self._task.cancel()
        return max(self._longest, time.perf_counter() - self._last)

    async def _tick(self) -> None:
        while True:
            now = time.perf_counter()
            self._longest, self._last = max(self._longest, now - self._last), now
            await asyncio.sleep(0.01)
