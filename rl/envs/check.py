"""Finds mistakes in an environment and reports them as sentences for its author.

Checks the problems of both splits, then plays episodes (`rl.envs.check_episodes`). It cannot know whether the rewards
are right.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl.envs.check_episodes import check_episodes
from rl.envs.findings import Findings, message_fault
from rl.protocols import Env
from rl.rollouts.guard import time_limit_of

_METHODS = {"train_problems": "(seed, start, count)", "eval_problems": "(count)"}
_NUM_TRAIN, _NUM_EVAL = 256, 16  # many training problems, because leaks between the splits are found by chance
_NUM_PLAYED = 4  # problems of each split
_TIME_LIMIT_S = 10.0  # of a call; shorter than that of a run, because the author waits
_SLOW_S = 1.0  # seconds of CPU time for one call of train_problems or eval_problems


def require_env(env: object) -> None:
    """Raises ValueError, naming what is missing, unless `env` has what `rl.protocols.Env` asks for."""
    missing = _missing(env)
    if missing:
        raise ValueError(f"env is a {type(env).__name__}, and {missing[0]}; see rl.protocols.Env")


def check_env(env: Env, *, time_limit_s: float | None = None) -> list[str]:
    """One sentence for each mistake; an empty list for an environment that loops can use.

    A call of the environment may last `time_limit_s`: by default the environment's own `call_time_limit_s`, or 10 s.
    The whole check usually takes seconds, and at most about six times the limit. It runs an event loop of its own, so
    it must not be called from a coroutine.
    """
    missing = _missing(env)
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
        asyncio.run(check_episodes(findings, [*train[:_NUM_PLAYED], *evals[:_NUM_PLAYED]], time_limit_s))
    return findings.sentences


def _call(findings: Findings, name: str, method: Callable[[], Sequence[Any]]) -> Sequence[Any] | None:
    """The problems that a method of the environment returns; None if it raises."""
    start, computed = time.perf_counter(), time.thread_time()
    try:
        problems = list(method())
        _keys(problems)  # id and prompt may be properties that raise
    except Exception as error:
        findings.add(f"{name} raised {type(error).__name__}: {error}")
        return None
    seconds, computed = time.perf_counter() - start, time.thread_time() - computed
    # Wall-clock time alone may be the fault of a busy machine, so it has a limit five times as high.
    if computed > _SLOW_S or seconds > 5 * _SLOW_S:
        findings.add(f"{name} took {seconds:.1f} s for {len(problems)} problems, during which the whole loop waits")
    return problems


def _missing(env: object) -> list[str]:
    """One sentence for each attribute of `rl.protocols.Env` that is missing or of the wrong type."""
    if isinstance(env, type):
        return [f"{env.__name__} is a class; an instance of it is needed"]
    found: list[str] = []
    name, stop = getattr(env, "name", None), getattr(env, "stop", None)
    if not isinstance(name, str) or not name:
        found.append(f"its name is {name!r}; a text for readers of the metrics is needed")
    if not isinstance(stop, tuple) or not all(isinstance(s, str) and s for s in stop):  # pyright: ignore[reportUnknownVariableType]
        found.append(f"its stop is {stop!r}; a tuple of non-empty strings is needed, () for none")
    limit = time_limit_of(env)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance] - it is the user's
        found.append(f"its call_time_limit_s is {limit!r}; a finite number of seconds above 0 is needed")
    return found + [
        f"it has no method {method}{arguments}"
        for method, arguments in _METHODS.items()
        if not callable(getattr(env, method, None))
    ]


def _check_streams(findings: Findings, env: Env, train: Sequence[Any], evals: Sequence[Any]) -> None:
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
        shared = {key[index] for key in _keys(evals)} & {key[index] for key in _keys([*train, *other])}
        if shared:
            findings.add(f"training and held-out problems share the {what} {min(shared)[:200]!r}")


def _keys(problems: Sequence[Any]) -> list[tuple[str, str]]:
    """(id, prompt) of each problem as text. Missing attributes are reported later, by `_check_problems`."""
    return [(str(getattr(p, "id", None)), str(getattr(p, "prompt", None))) for p in problems]


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
