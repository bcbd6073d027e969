"""`check_env` finds nothing wrong with the shipped environments, and every mistake of broken ones."""

import asyncio
import importlib
import inspect
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ownloop_doctors.check_env import check_env
from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.python_arithmetic import PythonArithmetic
from plugins.sandbox.tests.here import need
from rl.envs.jsonl import JsonlReward
from rl.envs.largest_number import LargestNumber
from rl.envs.procedural import TextProblem
from rl.envs.reasoning import ReasoningGym
from rl.protocols import Done, Env, Observation
from rl.rollouts.guard import require_env, time_limit_of
from rl.tiny_tasks import EvenWords
from tests.waiting import LIMIT_S

# Modules of rl/envs without environment.
ROOT = Path(__file__).parents[3]
MODULES = {"calculator", "math_answers", "math_process", "procedural"}
# These need a dataset, an optional package, a server or other environments, and have tests of their own.
ELSEWHERE = {"mixture", "math_problems", "code_problems", "judged", "reward_model", "tools", "mcp_server"}


def _jsonl(folder: Path) -> JsonlReward:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) + "\n" for i in range(600)))
    return JsonlReward(file=file, reward="tests.rl.rewards:exact", fields=("answer",))


SHIPPED: dict[str, Callable[[Path], Env]] = {
    "EvenWords": lambda folder: EvenWords(),
    "GuessNumber": lambda folder: GuessNumber(),
    "JsonlReward": _jsonl,
    "LargestNumber": lambda folder: LargestNumber(),
    "PythonArithmetic": lambda folder: PythonArithmetic(),
    "ReasoningGym": lambda folder: ReasoningGym(task="spell_backward", params={"min_word_len": 3, "max_word_len": 6}),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_has_no_findings(name: str, tmp_path: Path) -> None:
    if name == "PythonArithmetic":
        need("auto")
    assert check_env(SHIPPED[name](tmp_path)) == []


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), True, "60", None])
def test_a_time_limit_that_is_none_is_found(limit: Any) -> None:
    class Env(EvenWords):
        call_time_limit_s: Any = limit

    assert check_env(Env()) == [f"its call_time_limit_s is {limit!r}; a finite number of seconds above 0 is needed"]
    with pytest.raises(ValueError, match="call_time_limit_s"):
        require_env(Env())


def test_code_with_a_longer_limit_has_longer_calls() -> None:
    assert time_limit_of(PythonArithmetic(time_limit_s=90)) > 90


def test_episodes_are_checked_with_their_own_time_limit() -> None:
    class Slow(EvenWords):
        call_time_limit_s = 0.05

        def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
            return [replace(problem, score=_slowly) for problem in EvenWords.train_problems(self, seed, start, count)]

    assert any("did not answer within 0.05 s" in finding for finding in check_env(Slow()))


def _slowly(answer: str) -> float:
    time.sleep(0.2)
    return float(len(answer) > 4)


def test_every_shipped_environment_is_checked() -> None:
    folders = {"rl.envs": ROOT / "rl" / "envs", "ownloop_tasks": ROOT / "plugins" / "tasks" / "ownloop_tasks"}
    files = {package: {path.stem for path in folder.glob("[a-z]*.py")} for package, folder in folders.items()}
    names = [f"{package}.{name}" for package in files for name in files[package] - MODULES - ELSEWHERE]
    modules = [importlib.import_module(name) for name in ("rl.tiny_tasks", *names)]
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    found = {each.__name__ for each in classes if hasattr(each, "train_problems") and each.__module__ != Env.__module__}
    assert found == set(SHIPPED)


@dataclass(frozen=True)
class Item:
    """A problem of `Numbers`."""

    id: Any
    prompt: Any
    answer: Callable[[str], Any] = lambda completion: Done(reward=float(completion == "7"))

    def start(self) -> "Item":
        return self

    def reply(self, completion: str) -> Any:
        return self.answer(completion)


def _item(number: int) -> Item:
    return Item(id=str(number), prompt=f"number {number}")


class Numbers:
    """A valid environment, of which a test may replace parts by broken ones."""

    name: Any = "numbers"
    stop: Any = ()

    def __init__(self, make: Callable[[int], Any] = _item, **changes: Any) -> None:
        self.make = make
        for name, value in changes.items():
            setattr(self, name, value)

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        return [self.make(seed * 10_000 + i) for i in range(start, start + count)]

    def eval_problems(self, count: int) -> list[Any]:
        return [self.make(-1 - i) for i in range(count)]


def _with(**changes: Any) -> Numbers:
    return Numbers(lambda number: replace(_item(number), **changes))


def _answering(answer: Callable[[str], Any]) -> Numbers:
    return _with(answer=answer)


def _scoring(score: Callable[[str], float]) -> Numbers:
    """Problems whose right answer is 8 and a wrong one 9."""

    def make(number: int) -> TextProblem:
        return TextProblem(id=f"{number}", prompt=f"number {number}", score=score, answer="8", wrong_answers=("9",))

    return Numbers(make)


class Reluctant(Item):
    """Its coroutine blocks the event loop."""

    async def reply(self, completion: str) -> Any:
        time.sleep(0.4)
        return Done(reward=0.0)


class Turns:
    """A problem that is its own episode and counts turns without ever starting again from 0."""

    def __init__(self, number: int) -> None:
        self.id = self.prompt = f"number {number}"
        self.num_turns = 0

    def start(self) -> Any:
        return self

    def reply(self, completion: str) -> Any:
        self.num_turns += 1
        return Done(reward=0.0) if self.num_turns >= 3 else Observation(messages="again")


class Shared(Turns):
    """Starts again from 0 with every episode, which resets an episode that is still running."""

    def start(self) -> Any:
        self.num_turns = 0
        return self


class Lazy:
    """A problem whose prompt is a property that raises."""

    id = "lazy"

    @property
    def prompt(self) -> str:
        raise KeyError("question")


def test_a_minimal_environment_is_enough() -> None:
    assert check_env(Numbers()) == []
    assert check_env(_scoring(lambda completion: float(completion == "8"))) == []
    five: Any = _scoring(lambda completion: 5.0 * (completion == "8"))
    five.best_reward = 5.0
    assert check_env(five) == []


_counter = itertools.count()

BROKEN: list[tuple[Any, str]] = [
    (Numbers, "Numbers is a class; an instance of it is needed"),
    (Numbers(name=""), "its name is ''"),
    (Numbers(stop="\n"), r"its stop is '\n'; a tuple of non-empty strings"),
    (Numbers(eval_problems=None), "it has no method eval_problems(count)"),
    (Numbers(train_problems=lambda seed, start, count: 1 / 0), "train_problems raised ZeroDivisionError"),
    (Numbers(train_problems=lambda seed, start, count: [_item(0)]), "returned 1 problems when asked for 256"),
    (Numbers(lambda number: _item(next(_counter))), "returned other problems the second time"),
    (
        Numbers(train_problems=lambda seed, start, count: [_item(seed * 1000 + i) for i in range(count)]),
        "is not the part from 8 to 16",
    ),
    (
        Numbers(train_problems=lambda seed, start, count: [_item(i) for i in range(start, start + count)]),
        "the same problems for seeds 0 and 1",
    ),
    (Numbers(eval_problems=lambda count: [_item(-1)] * count), "eval_problems returned an id twice"),
    (Numbers(eval_problems=lambda count: [_item(i + 5) for i in range(count)]), "share the id '10'"),
    (
        Numbers(eval_problems=lambda count: [Item(id=f"h{i}", prompt=f"number {i}\n") for i in range(count)]),
        "share the prompt 'number 0'",
    ),
    (
        Numbers(eval_problems=lambda count: [_item(-i - count) for i in range(count)]),
        "does not begin with eval_problems(n / 2)",
    ),
    (_with(id=3), "the id of a training problem is 3"),
    (_with(id="p"), "the id 'p' belongs to two different prompts"),
    (_with(prompt=""), "is empty"),
    (_with(prompt=[]), "is []; text, or messages with 'role' and 'content'"),
    (_with(prompt=["hello"]), "holds 'hello'; each message needs 'role' and 'content'"),
    (_with(prompt=[{"role": "user", "content": None}]), "each message needs 'role' and 'content', both text"),
    (_with(prompt=[{"role": "human", "content": "?"}]), "a message of role 'human'; roles are system, user"),
    (Numbers(lambda number: f"problem {number}"), "the id of a training problem is None"),
    (Numbers(lambda number: Lazy()), "train_problems raised KeyError: 'question'"),
    (_answering(lambda completion: completion[0]), "answered '' each time, failed: IndexError"),
    (_answering(lambda completion: 1.0), "it replied with a float; an Observation or a Done is expected"),
    (_answering(lambda completion: Done(reward=float("nan"))), "its reward is nan; it must be a finite number"),
    (
        _answering(lambda completion: Done(reward=next(_counter))),
        "went differently the second time, in turn 1 with ('done'",
    ),
    (
        Numbers(Turns),
        "went differently the second time, in turn 1 with ('done', 0.0) instead of ('observation', 'again', 0.0)",
    ),
    (Numbers(Shared), "episodes share state; start() must return an independent episode"),
    (_answering(lambda completion: Observation(messages="again")), "did not end within 100 turns"),
    (
        _answering(lambda completion: Observation(messages=[{"role": "user", "content": "?"}])),
        "the prompt is text, the observation messages",
    ),
    (_answering(lambda completion: Observation(messages="")), "the observation is empty"),
    (
        _answering(lambda completion: Done(reward=5.0 * (completion == "42"))),
        "had reward 5, above best_reward, which is 1",
    ),
    (_answering(lambda completion: Done(reward=0.5)), "every answer that was played had reward 0.5"),
    (_scoring(lambda completion: 0.0), "every answer that was played had reward 0"),
    (_scoring(lambda completion: float(completion == "7")), "answer had reward 0, below best_reward, which is 1"),
    (_scoring(lambda completion: 0.5 * (completion == "8")), "answer had reward 0.5, below best_reward, which is 1"),
    (_scoring(lambda completion: float(completion in "89")), "one of its wrong_answers, had the best reward, 1"),
    (_answering(lambda completion: time.sleep(9)), "it did not answer within 0.5 s"),
    (Numbers(lambda number: Reluctant(id=str(number), prompt=f"number {number}")), "blocked the event loop"),
]


@pytest.mark.stranger("2.D11")
@pytest.mark.parametrize(("env", "finding"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_every_mistake_is_found(env: Any, finding: str) -> None:
    findings = check_env(cast(Env, env), time_limit_s=0.5 if "did not answer" in finding else LIMIT_S)
    assert any(finding in text for text in findings), findings
    assert len(findings) <= 6


@pytest.mark.parametrize(("num_slow", "is_found"), [(1, False), (2, True)])
def test_waiting_counts_where_it_comes_again(num_slow: int, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([True] * num_slow)
    of_seed = Numbers().train_problems

    def train_problems(seed: int, start: int, count: int) -> Any:
        seconds.now += 6.0 * next(waits, False)
        return of_seed(seed, start, count)

    seconds = SimpleNamespace(now=0.0, thread_time=lambda: 0.0)
    seconds.perf_counter = lambda: seconds.now
    monkeypatch.setattr("ownloop_doctors.check_env.time", seconds)
    findings = check_env(cast(Env, Numbers(train_problems=train_problems)))
    assert [finding.partition(" for ")[0] for finding in findings] == ["train_problems took 6.0 s"] * is_found


def test_a_coroutine_that_awaits_is_accepted() -> None:
    class Patient(Item):
        async def reply(self, completion: str) -> Any:
            await asyncio.sleep(0.001)
            return Done(reward=0.0)

    assert check_env(Numbers(lambda number: Patient(id=str(number), prompt=f"number {number}"))) == []


def test_a_loop_refuses_an_object_that_is_not_an_environment() -> None:
    require_env(Numbers())
    with pytest.raises(ValueError, match=r"^env is a Numbers, and it has no method eval_problems\(count\); see "):
        require_env(Numbers(eval_problems=None))
