"""No function that reads a model's text takes more than linear time, whatever is repeated in it.

A step is what an empty loop of Python takes for a character, measured beside, so that the bound does not depend on the
machine. A quadratic function of 64 KB takes thousands of steps a character.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from ownloop_agents.splicing import digests
from ownloop_tasks.code_problems import python_of
from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.judged import Judge, score_of
from ownloop_tasks.math_answers import is_list, is_one_answer, last_boxes, plain
from ownloop_tasks.math_problems import MathProblem, final_answer
from ownloop_tasks.tools import parse_tool_calls
from rl.tiny_tasks import even
from rl.types import Answer, open_reasoning

SIZE = 1 << 16
MAX_STEPS = 250
JUDGE = Judge(base_url="http://127.0.0.1/v1", model="judge", lowest=-10)
PROBLEM = MathProblem(id="", prompt="", expected="5", answer="5", answer_form="anywhere", time_limit_s=1.0)


def _scored(text: str) -> None:
    with suppress(ValueError):
        score_of(JUDGE, text)


def _digested(text: str) -> None:
    calls = [{"function": {"name": "f", "arguments": text}}]
    digests([{"role": "assistant", "content": text, "tool_calls": calls}], None)


READERS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "code": (python_of, "```python\n", "\n```"),
    "hermes": (lambda text: parse_tool_calls(text, "hermes"), '<tool_call>{"a": ', "</tool_call>"),
    "llama3_json": (lambda text: parse_tool_calls(text, "llama3_json"), '{"a":' * 300, "}" * 300),
    "llama3_json, cut off": (lambda text: parse_tool_calls(text, "llama3_json", is_cut_off=True), '{"a": "', '"]'),
    "boxes": (last_boxes, "\\boxed{1}", "x\\boxed{2}"),
    "boxes, cut off": (lambda text: last_boxes(text, is_cut_off=True, is_list=True), "\\boxed{1}", "x\\boxed{2}"),
    "one answer": (is_one_answer, "\\boxed{1},", "\\boxed{2}"),
    "a list": (is_list, "(", ")"),
    "plain": (plain, "1", "e-05"),
    "the last number": (PROBLEM.answer_of, "\\boxed{", "}"),
    "the final answer": (lambda text: final_answer(text, "####"), "####", "\\boxed{2}"),
    "a score": (_scored, "0", "to"),
    "a guess": (lambda text: GuessNumber().eval_problems(1)[0].start().reply(text), "5", "x"),
    "a call of an agent": (_digested, '{"a": "', '"}'),
    "reasoning": (Answer.read, "<think>", "</think>"),
    "open reasoning": (open_reasoning, "<think>", "</think>"),
    "words": (even, "w4", ""),
}
"""Each with what stands around the repeats, besides nothing."""
REPEATED = [
    *("~", "`", "```", "```\n", "```python\n", '```python\n"""\n', "```python\n'''\n```\n", "x```\n"),
    *("{", "[", '{"', '{"a":', '{"a"}', '{"a":[1,', "{  ", '{"name": "f", "parameters": {}, ', "<tool_call>"),
    *("</tool_call>", "<think>", "</think>", "\\boxed{", "\\boxed{ ", "\\boxed ", "\\boxed1 , ", "\\boxed{1}$x"),
    *("\\boxed\\a{b}", "}", "(", "()", "\\", "\\,", '"', "'", "$", " ", "\n", "-", "\u2013 ", "1", "1,", "1."),
    *(", ", "1 ", "1,111", "111~", "1e-05", "0 to ", "7/10 ", "10 is ", "and ", "a_", "w4 "),
]


def _steps(read: Callable[[str], object], text: str) -> float:
    """Of CPU time, for a character."""
    times = [time.thread_time()]
    for work in (lambda: [None for _ in range(20_000)], lambda: read(text)):
        work()
        times.append(time.thread_time())
    return (times[2] - times[1]) / (times[1] - times[0]) * 20_000 / len(text)


@pytest.mark.stranger("2.A1")
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_more_than_linear_time(reader: str) -> None:
    read, before, after = READERS[reader]
    for repeated in REPEATED:
        text = repeated * (SIZE // len(repeated))
        for each in (text, before + text + after):
            if _steps(read, each) > MAX_STEPS:  # again, as the machine may have been busy
                assert _steps(read, each) < MAX_STEPS, (repeated, each[:9])
