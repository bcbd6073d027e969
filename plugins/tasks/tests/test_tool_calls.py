"""Tool calls as `ownloop_tasks.tools` finds them, against vLLM's own parsers."""

import json
from typing import Any

import pytest

from ownloop_tasks.tools import ToolFormat, parse_tool_calls

pytestmark = pytest.mark.vllm


class Vocabulary:
    """What vLLM's parsers ask of a tokenizer."""

    def get_vocab(self) -> dict[str, int]:
        return {"<|python_tag|>": 0, "<tool_call>": 1, "</tool_call>": 2}


def _parsed_by_vllm(text: str, tool_format: ToolFormat) -> list[tuple[str, Any]]:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    parser: Any = {"hermes": Hermes2ProToolParser, "llama3_json": Llama3JsonToolParser}[tool_format]
    calls = parser(Vocabulary()).extract_tool_calls(text, None).tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


NESTED = '{"name": "f", "arguments": {"a": {"b": [1, {"c": "}"}]}, "name": "x"}}'


@pytest.mark.parametrize(
    ("text", "tool_format"),
    [
        ("The answer is 42.", "hermes"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>', "hermes"),
        (f"First:\n<tool_call>{NESTED}</tool_call> then\n<tool_call>{NESTED}</tool_call>", "hermes"),
        ('Cut off: <tool_call>{"name": "add", "arguments": {}}', "hermes"),
        ('{"name": "add", "arguments": {}}', "hermes"),
        ('{"name": "add", "parameters": {"a": "naïve ☃"}}', "llama3_json"),
        (f"<|python_tag|>{NESTED}; {NESTED}", "llama3_json"),
        (f"Look: {NESTED}", "llama3_json"),
        ("\\frac{1}{2}", "llama3_json"),
        ("The answer is 42.", "llama3_json"),
    ],
)
def test_well_formed_calls_are_found_as_vllm_finds_them(text: str, tool_format: ToolFormat) -> None:
    found = parse_tool_calls(text, tool_format)
    assert not any(call.fault for call in found)
    assert [(call.name, call.arguments) for call in found] == _parsed_by_vllm(text, tool_format)
