"""Episodes of several turns, and environments that fail."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from rl.advantages import ADVANTAGES
from rl.data.packing import pack_row
from rl.protocols import Done, Observation, Reply
from rl.rollouts.episodes import group_to_data, rollout_group, rollout_to_datum
from rl.rollouts.guard import MAX_ABANDONED, MAX_THREADS, EnvironmentFailedError, call_environment, waiting
from rl.rollouts.rendering import Renderer
from rl.types import Group, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer
from tests.waiting import LIMIT_S, wait_until


class Scripted:
    """A problem whose episodes reply with `answer(turn, completion)`; turns count from 0."""

    id = "scripted"
    prompt = "it begins"

    def __init__(self, answer: Callable[[int, str], Any]) -> None:
        self._answer = answer

    def start(self) -> "ScriptedEpisode":
        return ScriptedEpisode(self._answer)


class ScriptedEpisode:
    """One attempt."""

    def __init__(self, answer: Callable[[int, str], Any]) -> None:
        self._answer = answer
        self._turn = -1

    def reply(self, completion: str) -> Reply:
        self._turn += 1
        return self._answer(self._turn, completion)


def _three_turns(turn: int, completion: str) -> Reply:
    if turn < 2:
        return Observation(messages=f"turn {turn} is over", reward=turn - 10)
    return Done(reward=float(completion == "c"), metrics={"turns_played": turn + 1})


def _play(
    answer: Callable[[int, str], Any], said: str = "abcdefgh", num_samples: int = 2, **options: Any
) -> tuple[Group, ScriptedGenerator]:
    """Plays with a model that says the next letter of `said` in each turn, which it infers from the prompt's length."""
    renderer = cast(Renderer, WordRenderer(options.pop("max_model_len", None)))
    generator = ScriptedGenerator(lambda prompt, i, seed: said[(len(prompt) - 2) // 5])
    sampling = SamplingParams(max_tokens=3, seed=options.pop("seed", None))
    group = rollout_group(generator, renderer, Scripted(answer), sampling, num_samples, **options)
    return asyncio.run(group), generator


def test_the_model_reads_its_own_turns_and_the_replies() -> None:
    group, generator = _play(_three_turns, num_samples=1)
    assert [prompt for prompt, _, _ in generator.calls] == [
        (2, 6),
        (2, 6, ord("a"), 4, 1, 2, 4),
        (2, 6, ord("a"), 4, 1, 2, 4, ord("b"), 4, 1, 2, 4),
    ]
    (rollout,) = group.rollouts
    assert rollout.reward == 1
    assert rollout.metrics == {"turns_played": 3}
    assert rollout.num_sampled_tokens == 3
    assert rollout.text == "a\nturn 0 is over\nb\nturn 1 is over\nc"
    assert not rollout.truncated


class _Opens(WordRenderer):
    """A renderer whose template begins every answer with reasoning."""

    def opening(self, tokens: Sequence[int]) -> str:
        del tokens
        return "<think>"


@pytest.mark.stranger("C2")
@pytest.mark.parametrize(
    ("opens", "prompt", "content"),
    [
        (True, "it begins", ["b", "d"]),
        (False, "it begins", ["b", "d"]),
        (False, [{"role": "assistant", "content": "I <think> that"}], ["b", "d"]),
    ],
)
@pytest.mark.parametrize("is_cut_off", [False, True])
def test_an_episode_gets_answers_in_parts(opens: bool, prompt: Any, content: list[str], is_cut_off: bool) -> None:
    heard = list[Any]()

    def answer(turn: int, completion: str) -> Reply:
        heard.append(completion)
        messages = "on" if isinstance(prompt, str) else [{"role": "user", "content": "on"}]
        return Observation(messages=messages) if turn == 0 else Done(reward=1)

    said = iter(["a</think>b", "<think>c</think>d"])
    generator = ScriptedGenerator(lambda prompt, i, seed: next(said), "length" if is_cut_off else "stop")
    problem, renderer = Scripted(answer), cast(Renderer, (_Opens if opens else WordRenderer)())
    problem.prompt = prompt
    (rollout,) = asyncio.run(rollout_group(generator, renderer, problem, SamplingParams(max_tokens=9), 1)).rollouts
    assert rollout.reward == 1
    assert [(a.reasoning, a.content, a.is_cut_off) for a in heard] == [
        ("a", "b", is_cut_off),
        ("<think>c" if opens else "c", "d", is_cut_off),
    ]


def test_only_sampled_tokens_are_scored() -> None:
    group, _ = _play(_three_turns, num_samples=1)
    datum = rollout_to_datum(group.rollouts[0], 0.5)
    a, b, c = map(ord, "abc")
    inputs: Any = {name: array.tolist() for name, array in datum.loss_inputs.items()}
    assert datum.tokens.tolist() == [2, 6, a, 4, 1, 2, 4, b, 4, 1, 2, 4]
    assert inputs["target_tokens"] == [6, a, 4, 1, 2, 4, b, 4, 1, 2, 4, c]
    assert inputs["weights"] == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert inputs["logprobs"] == [0, -1, 0, 0, 0, 0, -1, 0, 0, 0, 0, -1]
    assert inputs["advantages"] == [0, 0.5, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0.5]


def test_turns_of_a_group_share_their_prefix_in_a_row() -> None:
    letters = iter("cd")

    def answer(turn: int, completion: str) -> Reply:
        return _three_turns(turn, next(letters) if turn == 2 else completion)

    group, _ = _play(answer)
    data = group_to_data(group, ADVANTAGES["group_mean"])
    row = pack_row(data, share_prefixes=True)
    assert len(data) == 2
    assert len(row.tokens) < sum(len(datum.tokens) for datum in data)
    assert len(row.pair_index) == 6


def test_seeds_of_later_turns_depend_on_sample_and_turn_alone() -> None:
    _, generator = _play(_three_turns, seed=7)
    seeds = [sampling.seed for _, sampling, _ in generator.calls]
    assert seeds[0] == 7
    assert len(set(seeds)) == 5
    _, alone = _play(_three_turns, num_samples=1, seed=8)
    assert {s.seed for _, s, _ in alone.calls[1:]} < set(seeds)  # of the second sample


def test_a_full_context_ends_the_episode_as_truncated() -> None:
    group, generator = _play(_three_turns, num_samples=1, max_model_len=8)
    assert [sampling.max_tokens for _, sampling, _ in generator.calls] == [3, 1]  # the room that is left is used
    (rollout,) = group.rollouts
    assert rollout.truncated
    assert rollout.reward == -9  # the last observation's
    assert len(rollout.turns) == 2
    assert len(rollout_to_datum(rollout, 1.0).tokens) == 7  # without the unanswered message


def test_an_endless_episode_ends_with_the_context() -> None:
    group, _ = _play(lambda turn, text: Observation(messages="go on"), said="a" * 99, max_model_len=100)
    assert [rollout.truncated for rollout in group.rollouts] == [True, True]
    assert group.failures == ()


def _raises(turn: int, completion: str) -> Reply:
    raise OSError("the tool is gone")


def _exits(turn: int, completion: str) -> Reply:
    sys.exit(3)


async def _hangs(turn: int, completion: str) -> Reply:
    await asyncio.sleep(3600)
    return Done(reward=0.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_raises, "OSError: the tool is gone"),
        (_exits, "SystemExit: 3"),
        (lambda turn, text: time.sleep(10), r"did not answer within 1 s"),
        (_hangs, r"did not answer within 1 s"),
        (lambda turn, text: 1.0, "replied with a float; an Observation or a Done is expected"),
        (lambda turn, text: Done(reward=float("nan")), "its reward is nan"),
        (lambda turn, text: Done(reward=0.0, metrics={"speed": cast(Any, None)}), "its speed is None"),
        (
            lambda turn, text: Done(reward=0.0, metrics={"reward_high": 1.0}),
            "its metric 'reward_high' has the name of one",
        ),
        (lambda turn, text: Done(reward=0.0, metrics={"turns_mean": 1.0}), "that every run reports; rename it"),
        (lambda turn, text: Done(reward=0.0, metrics={"step": 1.0}), "its metric 'step' has the name of one"),
        (lambda turn, text: Observation(messages=[{"role": "user", "content": "?"}]), "prompt is text and its obs"),
        (lambda turn, text: next(iter(())), "StopIteration"),
    ],
)
def test_what_an_environment_does_wrong_costs_that_rollout_alone(answer: Callable[..., Any], message: str) -> None:
    first = threading.Lock()

    def one_of_three(turn: int, completion: str) -> Any:
        return answer(turn, completion) if first.acquire(blocking=False) else Done(reward=1.0)

    group, _ = _play(one_of_three, num_samples=3, time_limit_s=1.0 if "did not answer" in message else LIMIT_S)
    assert group.rewards.tolist() == [1, 1]
    (failure,) = group.failures
    assert failure.startswith("problem 'scripted': ")
    assert message in failure


def test_a_coroutine_is_awaited() -> None:
    async def answer(turn: int, completion: str) -> Reply:
        await asyncio.sleep(0)
        return _three_turns(turn, completion)

    group, _ = _play(answer)
    assert group.rewards.tolist() == [1, 1]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_reduced_to_one_rollout_trains_nothing(name: str) -> None:
    first = threading.Lock()
    group, _ = _play(lambda turn, text: Done(reward=1.0) if first.acquire(blocking=False) else None)
    assert len(group.rollouts) == len(group.failures) == 1
    assert group_to_data(group, ADVANTAGES[name]) == []


@pytest.mark.stranger("C7")
@pytest.mark.parametrize("queue", ["threads", "a lock in a thread", "a lock of the loop", "a lock in a call of a call"])
def test_waiting_in_a_queue_does_not_count(queue: str) -> None:
    async def last_call(limit_s: float) -> int:
        """A call that waits twice as long as it may take."""
        release, lock = threading.Event(), asyncio.Lock()

        def in_thread() -> int:
            with waiting():
                release.wait(LIMIT_S)
            return 7

        async def in_loop() -> int:
            with waiting():
                await lock.acquire()
            return 7

        async def nested() -> int:
            return await call_environment(in_thread, time_limit_s=limit_s)

        functions: dict[str, Callable[[], Any]] = {
            "threads": lambda: 7,
            "a lock in a thread": in_thread,
            "a lock of the loop": in_loop,
            "a lock in a call of a call": nested,
        }
        await lock.acquire()
        calls = MAX_THREADS if queue == "threads" else 1
        before = [asyncio.create_task(call_environment(release.wait, time_limit_s=LIMIT_S)) for _ in range(calls)]
        last = asyncio.create_task(call_environment(functions[queue], time_limit_s=limit_s))
        await asyncio.sleep(2 * limit_s)
        assert not last.done() or last.exception()
        release.set()
        lock.release()
        await asyncio.gather(*before)
        return await last

    for limit_s in (0.25, 4.0, 16.0):  # a busy host may need longer even for this call
        with contextlib.suppress(EnvironmentFailedError):
            assert asyncio.run(last_call(limit_s)) == 7
            return
    pytest.fail("waiting counts")


def test_work_after_waiting_counts() -> None:
    def hangs() -> None:
        with waiting():
            pass
        threading.Event().wait(LIMIT_S)

    with pytest.raises(EnvironmentFailedError, match=r"it did not answer within 0\.1 s"):
        asyncio.run(call_environment(hangs, time_limit_s=0.1))


@pytest.mark.stranger("2.B7")
def test_calls_that_never_return_are_bounded() -> None:
    release, returned = threading.Event(), list[int]()
    before = threading.active_count()

    def hangs(number: int) -> None:
        release.wait(LIMIT_S)
        returned.append(number)

    async def several(count: int, limit_s: float) -> list[str]:
        calls = (call_environment(hangs, number, time_limit_s=limit_s) for number in range(count))
        return [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]

    try:
        told = asyncio.run(several(MAX_ABANDONED, 0.2))
        assert all(each.startswith("it did not answer within 0.2 s: ") for each in told)
        refused = asyncio.run(several(3 * MAX_ABANDONED, LIMIT_S))
        assert all(each.endswith(" earlier calls have never returned: no further one is started") for each in refused)
        assert threading.active_count() <= before + MAX_ABANDONED
    finally:
        release.set()
    wait_until(lambda: len(returned) == MAX_ABANDONED and threading.active_count() <= before, "their threads")
    assert asyncio.run(several(1, LIMIT_S)) == ["None"]  # what has returned makes room


async def test_the_loop_stays_free_while_an_environment_blocks() -> None:
    release = threading.Event()
    call = asyncio.create_task(call_environment(release.wait, LIMIT_S, time_limit_s=2 * LIMIT_S))
    for _ in range(10):
        await asyncio.sleep(0)
    release.set()
    assert await call


def test_a_timeout_error_of_an_environment_is_not_the_limit() -> None:
    def fails() -> None:
        raise TimeoutError("the judge is slow")

    with pytest.raises(EnvironmentFailedError, match="TimeoutError: the judge is slow"):
        asyncio.run(call_environment(fails, time_limit_s=LIMIT_S))


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    code = """
import asyncio, time
from rl.rollouts.guard import EnvironmentFailedError, call_environment
async def main():
    try:
        await call_environment(time.sleep, 1000, time_limit_s=0.1)
    except EnvironmentFailedError as error:
        print(error)
asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert result.stdout == "it did not answer within 0.1 s: its thread still runs, one of 1; at most 32 may\n"
