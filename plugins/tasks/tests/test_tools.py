"""Tools that a model calls in its own format. That calls are found as vLLM finds them is in tests/generator."""

import asyncio
import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownloop_doctors.check_env import check_env
from ownloop_tasks.calculator import calculate
from ownloop_tasks.mixture import Mixture, Task
from ownloop_tasks.tools import MAX_CALLS, ToolEnv, ToolFormat, parse_tool_calls
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.protocols import Done, Observation, Reply
from rl.rollouts.rendering import Renderer, prompt_text
from rl.tiny_models import tiny_llama
from rl.types import Answer
from tests.waiting import LIMIT_S

CALCULATE = "ownloop_tasks.calculator:calculate"
HERE = "plugins.tasks.tests.test_tools"


def double(number: int) -> dict[str, int]:
    """Doubles a number.

    Args:
        number: Any number.
    """
    return {"doubled": 2 * number}


async def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


_MEETING = threading.Barrier(3)


def meet(who: str) -> str:
    """Waits for two others.

    Args:
        who: Who waits.
    """
    _MEETING.wait(LIMIT_S)
    return who


class UnspeakableError(Exception):
    """An error whose words cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class QuitsError(BaseException):
    """An error that no `except Exception` sees."""


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(5000), [])
ODD: dict[str, Any] = {
    "tuple keys": {("a", "b"): 3},
    "a cycle": CYCLE,
    "depth": DEEP,
    "words": UnspeakableError(),
    "SystemExit": SystemExit(3),
    "Quits": QuitsError(),
    "CancelledError": asyncio.CancelledError(),
    "StopIteration": StopIteration(),
    "Unspeakable": UnspeakableError(),
}


def odd(kind: str) -> Any:
    """Returns or raises something odd.

    Args:
        kind: What.
    """
    if isinstance(ODD[kind], BaseException) and kind != "words":
        raise ODD[kind]
    return ODD[kind]


async def odd_later(kind: str) -> Any:
    """Returns or raises something odd.

    Args:
        kind: What.
    """
    return odd(kind)


def echo(value: Any) -> Any:
    """Returns what it was given.

    Args:
        value: Anything.
    """
    return value


def undocumented(number: int) -> int:
    return number


class Sums:
    """Questions with one right answer, "42"."""

    name, stop = "sums", ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        prompt = [{"role": "user", "content": f"Question {number}?"}]
        return TextProblem(id=f"{number}", prompt=prompt, score=lambda answer: float(answer == "42"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _play(env: ToolEnv, *said: str) -> list[Reply]:
    async def play() -> list[Reply]:
        episode = await env.train_problems(0, 0, 1)[0].start()
        return [await episode.reply(text) for text in said]

    return asyncio.run(play())


def _results(env: ToolEnv, said: str) -> list[str]:
    """What the tools answered to one message."""
    (reply,) = _play(env, said)
    assert isinstance(reply, Observation)
    assert {m["role"] for m in reply.messages if not isinstance(m, str)} == {"tool"}
    return [m["content"] for m in reply.messages if not isinstance(m, str)]


def test_tools_are_called_until_there_is_an_answer() -> None:
    env = ToolEnv(env=Sums(), tools=(CALCULATE, f"{HERE}:double"))
    both = f"Let me see. {call('calculate', expression='6*7')}\n{call('double', number=4)}"
    *observations, done = _play(env, both, call("double", number=1), "42")
    assert [o.messages for o in observations if isinstance(o, Observation)] == [
        [{"role": "tool", "content": "42"}, {"role": "tool", "content": '{"doubled": 8}'}],
        [{"role": "tool", "content": '{"doubled": 2}'}],
    ]
    assert done == Done(reward=1.0, metrics={"tool_calls": 3, "tool_errors": 0})
    assert check_env(env) == []


@pytest.mark.stranger("C1")
def test_calls_in_reasoning_are_not_made() -> None:
    env, one = ToolEnv(env=Sums(), tools=(f"{HERE}:double",)), call("double", number=1)
    for said in (f"<think>I could write {one} but no need.</think>\n42", f"{one}</think>42", f"<think>{one}"):
        (done,) = _play(env, said)
        assert isinstance(done, Done)
        assert done.metrics == {"tool_calls": 0, "tool_errors": 0}
    assert _results(env, f"<think>{one}</think>{call('double', number=4)}") == ['{"doubled": 8}']


def test_the_calls_of_a_message_run_at_the_same_time() -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:meet",), tool_time_limit_s=20)
    assert _results(env, "".join(call("meet", who=who) for who in "abc")) == ["a", "b", "c"]


def test_a_message_may_hold_so_many_calls() -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:double",))
    numbers = range(MAX_CALLS + 2)
    observation, done = _play(env, "".join(call("double", number=number) for number in numbers), "42")
    assert isinstance(observation, Observation)
    results = [m["content"] for m in observation.messages if not isinstance(m, str)]
    assert results[:MAX_CALLS] == [json.dumps({"doubled": 2 * number}) for number in numbers[:MAX_CALLS]]
    assert results[MAX_CALLS:] == ["Error: A message may hold 8 tool calls. This one was not made."] * 2
    assert done == Done(reward=1.0, metrics={"tool_calls": MAX_CALLS + 2, "tool_errors": 2})


def test_the_last_message_is_the_answer_whatever_it_holds() -> None:
    env = ToolEnv(env=Sums(), tools=(CALCULATE,), max_turns=2)
    first, last = _play(env, call("calculate", expression="1"), call("calculate", expression="2"))
    assert isinstance(first, Observation)
    assert last == Done(reward=0.0, metrics={"tool_calls": 1, "tool_errors": 0})


def test_the_best_reward_is_the_environments() -> None:
    class Points(Sums):
        best_reward = 5.0

    assert [ToolEnv(env=env, tools=(CALCULATE,)).best_reward for env in (Points(), Sums())] == [5.0, 1.0]
    both = ToolEnv(env=Mixture(points=Task(Points()), sums=Task(Sums())), tools=(CALCULATE,))
    assert [problem.best_reward for problem in both.eval_problems(2)] == [5.0, 1.0]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("<tool_call>{calculate</tool_call>", "Error: The tool call is not valid JSON: "),
        ('<tool_call>{"name": "calculate"}</tool_call>', 'Error: A tool call needs a "name" and "arguments"'),
        ("<tool_call>[1]</tool_call>", 'Error: A tool call needs a "name" and "arguments"'),
        (call("calculator"), "Error: There is no tool 'calculator'; there is 'calculate', 'slow'."),
        (call("calculate", sum="1"), "Error: calculate: missing a required argument: 'expression'"),
        (call("calculate", expression="1/0"), "Error: ZeroDivisionError: division by zero"),
        (call("calculate", expression=7), "Error: TypeError: "),
        (call("calculate", expression="__import__('os')"), "Error: ValueError: \"__import__('os')\" is not arithmetic"),
        (call("slow", seconds=3600), "Error: it did not answer within 0.2 s"),
    ],
)
def test_errors_go_back_to_the_model(said: str, error: str) -> None:
    limit_s = 0.2 if "did not answer" in error else LIMIT_S
    env = ToolEnv(env=Sums(), tools=(CALCULATE, f"{HERE}:slow"), tool_time_limit_s=limit_s)
    (result,) = _results(env, said)
    assert result.startswith(error)
    *_, done = _play(env, said, "42")
    assert done == Done(reward=1.0, metrics={"tool_calls": 1, "tool_errors": 1})


@pytest.mark.stranger("C3")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("tool", ["odd", "odd_later"])
def test_an_odd_tool_costs_its_own_call_alone(tool: str, kind: str) -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:{tool}", f"{HERE}:double"))
    result, good = _results(env, call(tool, kind=kind) + call("double", number=1))
    assert result.startswith("Error: ")
    assert good == '{"doubled": 2}'


@pytest.mark.stranger("C3")
@pytest.mark.stranger("2.D10")
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"value": ' + "[" * 20000, "Error: The tool call is not valid JSON: "),
        ('{"value": ' + '{"a":' * 20000, "Error: The tool call is not valid JSON: "),
        ('{"value": ' + "[" * 200 + "]" * 200 + "}", "Error: The tool call is nested more than 100 deep."),
        ('{"value": ' + "9" * 5000 + "}", "Error: The tool call is not valid JSON: "),
        ('{"value": [{"a": -' + "9" * 4300 + "}]}", "Error: The tool call is not valid JSON: "),
        ('{"value": ' + "9" * 4000 + "}", "9" * 4000),
        ('{"value": NaN}', "Error: The tool call is not valid JSON: "),
        ('{"value": 1e999}', "Error: The tool call is not valid JSON: "),
        ('{"value": "\\ud800"}', "Error: The tool call is not valid JSON: it holds half of a surrogate pair"),
        ('{"value": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"value": "\\u0000"}', "\0"),
        ('{"value": null}', "null"),
    ],
)
@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json"])
def test_odd_arguments_are_answered(tool_format: ToolFormat, arguments: str, result: str) -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:echo",), tool_format=tool_format)
    said = f'{{"name": "echo", "arguments": {arguments}}}'
    (told,) = _results(env, f"<tool_call>{said}</tool_call>" if tool_format == "hermes" else said)
    assert told.startswith(result)


@pytest.mark.stranger("C1")
@pytest.mark.parametrize(
    ("tool_format", "said", "results"),
    [
        ("hermes", f"{call('double', number=1)}<tool_call>{{", ['{"doubled": 2}', "Error: The tool call was cut off"]),
        ("hermes", call("double", number=1).removesuffix("</tool_call>"), ["Error: The tool call was cut off"]),
        ("llama3_json", '{"name": "double", "parameters": {"number": 1}', ["Error: The tool call was cut off"]),
        (
            "llama3_json",
            '{"name": "echo", "parameters": {"value": {"name": "double", "parameters": {"number": 1}}',
            ["Error: The tool call was cut off"],
        ),
    ],
)
def test_a_call_that_is_cut_off_is_not_made(tool_format: ToolFormat, said: str, results: list[str]) -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:double", f"{HERE}:echo"), tool_format=tool_format)
    told = _results(env, Answer.read(said, is_cut_off=True))
    assert [t.startswith(result) for t, result in zip(told, results, strict=True)] == [True] * len(results)


@pytest.mark.stranger("C3")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                '{"name": "f"',
                '"parameters": {}',
                "{",
                "}",
                "[",
                ",",
                '"',
                "\\",
                "<tool_call>",
                "</tool_call>",
                "\ud800",
                "NaN",
                "9",
            ]
        )
    )
    | st.lists(st.characters(exclude_categories=())),
    st.sampled_from(["hermes", "llama3_json"]),
    st.booleans(),
)
def test_any_text_has_calls_or_faults(parts: list[str], tool_format: ToolFormat, is_cut_off: bool) -> None:
    for each in parse_tool_calls("".join(parts), tool_format, is_cut_off=is_cut_off):
        assert bool(each.name) != bool(each.fault) or (each.name == "" and not each.fault)


def test_llama_calls_are_bare_objects() -> None:
    env = ToolEnv(env=Sums(), tools=(f"{HERE}:double",), tool_format="llama3_json")
    assert _results(env, '{"name": "double", "parameters": {"number": 3}}') == ['{"doubled": 6}']
    assert _play(env, 'So it is {"value": {}} {"unfinished') == [
        Done(reward=0.0, metrics={"tool_calls": 0, "tool_errors": 0})
    ]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("(12 + 7) * -3", "-57"), ("7 / 2", "3.5"), (" 2*3 ", "6"), ("0.1 + 0.2", "0.3"), ("7 // 2 % 2", "1")],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["9**9**9", "True + 1", "a", "1" * 201, "1 +", "'a' * 9"])
def test_the_calculator_refuses_what_is_not_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


def test_the_template_or_a_system_message_shows_the_tools(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text("{% for t in tools or [] %}{{ t | tojson }} {% endfor %}" + template)
    (shown,) = ToolEnv(env=Sums(), tools=(CALCULATE,)).eval_problems(1)
    assert shown.tools[0]["function"]["parameters"]["required"] == ["expression"]
    renderer = Renderer(model)
    text = json.dumps(shown.tools[0])
    assert len(renderer.encode_problem(shown)) == len(renderer.encode(shown.prompt)) + len(text.split())

    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=r"chat template shows no tools; ToolEnv.show_tools 'system'"):
        Renderer(model).encode_problem(shown)
    (told,) = ToolEnv(env=Sums(), tools=(CALCULATE,), show_tools="system").eval_problems(1)
    assert text in str(told.prompt[0]["content"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert told.prompt[1:] == shown.prompt
    assert Renderer(model).encode_problem(told)


@pytest.mark.stranger("2.D2")
@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}], ["Be brief."]])
def test_tools_stand_below_a_system_message_of_any_form(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = TextProblem(id="a", prompt=[{"role": "system", "content": content}], score=float)
    monkeypatch.setattr(Sums, "eval_problems", lambda *_: [problem])
    (told,) = ToolEnv(env=Sums(), tools=(CALCULATE,), show_tools="system").eval_problems(1)
    assert prompt_text(told.prompt).startswith("Be brief.\n\n# Tools\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ()}, r"ToolEnv.tools is \(\)"),
        (
            {"tools": ("ownloop_tasks.calculator:add",)},
            "holds 'ownloop_tasks.calculator:add', which cannot be a tool: .*'add'",
        ),
        ({"tools": (f"{HERE}:undocumented",)}, "cannot be a tool: .*no docstring"),
        ({"tools": (CALCULATE, CALCULATE)}, "two functions of one name: calculate, calculate"),
        ({"tool_format": "herms"}, "tool_format is 'herms'"),
        ({"tool_format": "llama3_json", "show_tools": "system"}, "show_tools 'system' needs 'hermes'"),
        ({"max_turns": 0}, "ToolEnv.max_turns is 0"),
        ({"tool_time_limit_s": 0}, "ToolEnv.tool_time_limit_s is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    options.setdefault("tools", (CALCULATE,))
    with pytest.raises(ValueError, match=message):
        ToolEnv(env=Sums(), **options)
