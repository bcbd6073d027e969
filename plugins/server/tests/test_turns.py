"""A model's calls run in the order of their numbers, one at a time, whatever happens to one of them."""

import asyncio
import random

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from ownloop_server.answers import Answers, PendingCall, ResponseBody, Turns
from tests.waiting import run_virtual

pytestmark = pytest.mark.virtual


def test_any_order_of_arrival_gives_the_order_of_the_numbers() -> None:
    async def main(numbers: list[int]) -> list[int]:
        turns, answers, ran, running = Turns("model"), Answers(), list[int](), 0

        def call(number: int) -> PendingCall:
            async def run() -> ResponseBody:
                nonlocal running
                running += 1
                assert running == 1
                await asyncio.sleep(0)
                ran.append(number)
                running -= 1
                if number % 7 == 3:
                    raise ValueError("a user's mistake")
                return ResponseBody.json({"number": number})

            return run

        pending = {number: answers.open(number, "session", b"")[0] for number in numbers}
        for number in numbers:
            turns.put(number, call(number), pending[number])
            await asyncio.sleep(0)
        for number, each in pending.items():
            answer = await each.wait(5)
            assert answer is not None
            assert (b"mistake" in answer.content) == (number % 7 == 3)
        await turns.close()
        return ran

    for seed in range(20):
        numbers = list(range(50))
        random.Random(seed).shuffle(numbers)
        assert run_virtual(main(numbers)) == list(range(50))


async def test_results_are_forgotten_some_time_after_they_were_fetched() -> None:
    answers = Answers()
    fetched, _ = answers.open("fetched", "session", b"")
    kept, _ = answers.open("kept", "session", b"")
    for pending in (fetched, kept):
        pending.set(ResponseBody.json({}))
    await fetched.wait(1)
    answers.sweep()
    assert len(answers) == 2  # a client may ask again
    await asyncio.sleep(100)
    answers.sweep()
    assert answers.find(fetched.id) is None
    assert answers.find(kept.id) is kept
    waiting, _ = answers.open("waiting", "session", b"")
    await asyncio.sleep(2000)
    answers.sweep()
    assert answers.find(kept.id) is None  # nobody asked for it
    assert answers.find(waiting.id) is waiting
    answers.forget_owner("session")
    assert len(answers) == 0


async def test_calls_that_wait_end_with_the_model() -> None:
    turns, answers = Turns("model"), Answers()

    async def long() -> ResponseBody:
        await asyncio.sleep(0.05)
        return ResponseBody.json({"whole": True})

    async def never() -> ResponseBody:
        raise AssertionError("its turn never comes")

    pending = [answers.open(number, "session", b"")[0] for number in (0, 1, 7)]
    turns.put(0, long, pending[0])
    turns.put(1, never, pending[1])
    turns.put(7, never, pending[2])
    await asyncio.sleep(0.01)
    await turns.close()
    found = [await each.wait(1) for each in pending]
    running, *waiting = [answer.content for answer in found if answer is not None]
    assert b"whole" in running
    assert [b"model has ended" in content for content in waiting] == [True, True]
