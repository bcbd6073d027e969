"""Environments of several turns."""

import asyncio
from typing import Any

import pytest

from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.python_arithmetic import PythonArithmetic
from plugins.sandbox.tests.here import need
from rl.envs.largest_number import LargestNumber
from rl.protocols import Done, Observation, Reply
from rl.types import Answer


def _bisect(low: int, high: int, episode: Any) -> Done:
    """Plays with the best strategy, bisection."""
    while True:
        guess = (low + high) // 2
        reply = episode.reply(f" {guess}.\n")
        if isinstance(reply, Done):
            return reply
        low, high = (guess + 1, high) if "Higher" in reply.messages else (low, guess - 1)


def test_hints_lead_to_the_number() -> None:
    problems = GuessNumber().train_problems(0, 0, 50)
    ends = [_bisect(p.low, p.high, p.start()) for p in problems]
    assert all(end.metrics["found"] == 1 for end in ends)
    assert all(end.reward == pytest.approx(1.2 - 0.2 * end.metrics["guesses"]) for end in ends)


def test_a_game_ends_after_the_last_guess() -> None:
    (problem,) = GuessNumber(max_turns=3).train_problems(0, 0, 1)
    game = problem.start()
    first, second, last = (
        game.reply(text) for text in ("the number is big", str(problem.high + 5), str(problem.low - 5))
    )
    assert first == Observation(messages="Say a number.\nGuess: ")
    assert second == Observation(messages="Lower.\nGuess: ")
    assert last == Done(reward=0.0, metrics={"found": 0.0, "guesses": 3.0})
    assert problem.start().reply(str(problem.number)) == Done(reward=1.0, metrics={"found": 1.0, "guesses": 1.0})


def _lines(*lines: str) -> tuple[Reply, ...]:
    need("auto")

    async def play() -> tuple[Reply, ...]:
        (question,) = PythonArithmetic().train_problems(0, 0, 1)
        attempt = question.start()
        return tuple([await attempt.reply(line.format(answer=question.answer)) for line in lines])

    return asyncio.run(play())


def test_python_computes_the_answer() -> None:
    ran, done = _lines("Python: print({answer} + 1 - 1)", "Answer: {answer}")
    assert isinstance(ran, Observation)
    assert isinstance(done, Done)
    assert ran.messages == f"Output: {_answer()}\n"
    assert done == Done(reward=1.0, metrics={"lines": 2.0, "python_runs": 1.0})


def _answer() -> int:
    return PythonArithmetic().train_problems(0, 0, 1)[0].answer


@pytest.mark.stranger("C2")
async def test_reasoning_and_cut_lines_are_neither_run_nor_paid() -> None:
    question = PythonArithmetic().train_problems(0, 0, 1)[0]
    for said, is_cut_off in (("<think>Answer: {}</think> maybe", False), ("Answer: {}", True), ("Python: 1", True)):
        answer = Answer.read(said.format(question.answer), is_cut_off=is_cut_off)
        assert isinstance(await question.start().reply(answer), Observation)
    reply = await question.start().reply(f"<think>Python: 1</think>Answer: {question.answer}")
    assert isinstance(reply, Done)
    assert reply.reward == 1
    (words,) = LargestNumber().train_problems(0, 0, 1)
    assert words.answer is not None
    assert words.reply(f"<think>hm</think>\n{words.answer}").reward == 1
    assert words.reply(f"<think>{words.answer}").reward == 0


def test_code_that_fails_is_an_observation() -> None:
    failed, puzzled, out_of_lines = _lines("Python: 1 / 0", "I think so", "Python: print(1)")
    assert failed == Observation(messages="Output: ZeroDivisionError: division by zero\n")
    assert puzzled == Observation(messages="Write a line that begins with Python: or Answer:\n")
    assert isinstance(out_of_lines, Done)
    assert out_of_lines.reward == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GuessNumber(span=1), "GuessNumber.span is 1"),
        (lambda: GuessNumber(max_turns=6), "max_turns is 6: .* 5"),
        (lambda: PythonArithmetic(num_digits=10), "num_digits is 10"),
        (lambda: PythonArithmetic(max_turns=0), "PythonArithmetic.max_turns is 0"),
        (lambda: PythonArithmetic(time_limit_s=0), "PythonArithmetic.time_limit_s is 0"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
