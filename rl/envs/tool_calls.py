"""Finds tool calls in what a model wrote, in the formats of common chat templates.

`hermes` is the format of Qwen2.5, Qwen3 and Nous Hermes, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`;
`llama3_json` that of Llama 3, a bare JSON object with "name" and "parameters". The names are those of vLLM's parsers.
For well-formed calls the result is theirs, which a test holds; of a malformed call they say nothing, and a model that
is to learn needs to be told.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

ToolFormat = Literal["hermes", "llama3_json"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call, or what is wrong with it."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: str = ""
    """A sentence for the model about a malformed call; empty for a well-formed one."""


def parse_tool_calls(text: str, tool_format: ToolFormat) -> list[ToolCall]:
    """All calls in the text, in order; empty if the model called no tool."""
    return _PARSERS[tool_format](text)


def _parse_hermes(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for found in _HERMES.finditer(text):
        try:
            calls.append(_call(json.loads(found[1])))
        except ValueError as error:
            calls.append(ToolCall(fault=f"The tool call is not valid JSON: {error}"))
    return calls


def _parse_llama3_json(text: str) -> list[ToolCall]:
    """Objects without a name are part of the text: answers may hold JSON or LaTeX."""
    calls: list[ToolCall] = []
    decoder, end = json.JSONDecoder(), 0
    while (start := text.find("{", end)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
            continue
        if "name" in value and ("parameters" in value or "arguments" in value):
            calls.append(_call(value))
    return calls


def _call(value: Any) -> ToolCall:
    """The call that a JSON value stands for."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(fault='A tool call needs a "name" and "arguments", which are an object.')
    return ToolCall(name=name, arguments=cast("dict[str, Any]", arguments))


_PARSERS: dict[ToolFormat, Callable[[str], list[ToolCall]]] = {
    "hermes": _parse_hermes,
    "llama3_json": _parse_llama3_json,
}
