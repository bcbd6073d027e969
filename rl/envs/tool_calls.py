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
MAX_DEPTH = 100
"""How deep the lists and objects of a call may nest."""
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BEGUN = re.compile(r'\{\s*"')  # an object, not LaTeX
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_CUT_OFF = "The tool call was cut off by the limit of tokens, and not made."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call, or what is wrong with it."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: str = ""
    """A sentence for the model about a malformed call; empty for a well-formed one."""


def parse_tool_calls(text: str, tool_format: ToolFormat, *, is_cut_off: bool = False) -> list[ToolCall]:
    """All calls in the text, in order; empty if the model called no tool. A call that is cut off is malformed.

    Arguments nest at most `MAX_DEPTH` deep and hold what JSON can hold: no NaN, no infinity, no half of a surrogate.
    """
    return _PARSERS[tool_format](text, is_cut_off)


def _parse_hermes(text: str, is_cut_off: bool) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for found in _HERMES.finditer(text):
        if is_cut_off and not found[0].endswith("</tool_call>"):
            calls.append(ToolCall(fault=_CUT_OFF))
            continue
        try:
            calls.append(_call(json.loads(found[1])))
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(fault=f"The tool call is not valid JSON: {error}"))
    return calls


def _parse_llama3_json(text: str, is_cut_off: bool) -> list[ToolCall]:
    """Objects without a name are part of the text: answers may hold JSON or LaTeX."""
    calls: list[ToolCall] = []
    decoder, end = json.JSONDecoder(), 0
    while (start := text.find("{", end)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError as error:
            return [*calls, ToolCall(fault=f"The tool call is not valid JSON: {error}")]
        except ValueError:
            if is_cut_off and _BEGUN.match(text, start) and not _is_closed(text[start:]):
                # Objects within it must not be taken for calls of their own.
                return [*calls, ToolCall(fault=_CUT_OFF)] if '"name"' in text[start:] else calls
            end = start + 1
            continue
        if "name" in value and ("parameters" in value or "arguments" in value):
            calls.append(_call(value))
    return calls


def _is_closed(text: str) -> bool:
    """Whether the object with which the text begins has an end."""
    depth = 0
    for brace in re.findall("[{}]", _STRING.sub("", text)):
        depth += 1 if brace == "{" else -1
        if depth == 0:
            return True
    return False


def _call(value: Any) -> ToolCall:
    """The call that a JSON value stands for."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(fault='A tool call needs a "name" and "arguments", which are an object.')
    try:
        # A tool server must be able to read them again.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return ToolCall(fault=f"The tool call is not valid JSON: {_sentence(error)}")
    if _is_deeper(fields, MAX_DEPTH):
        return ToolCall(fault=f"The tool call is nested more than {MAX_DEPTH} deep.")
    return ToolCall(name=name, arguments=cast("dict[str, Any]", arguments))


def _sentence(error: Exception) -> str:
    return "it holds half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects nest more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = cast("list[Any]", [*value.values()] if isinstance(value, dict) else value)
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


_PARSERS: dict[ToolFormat, Callable[[str, bool], list[ToolCall]]] = {
    "hermes": _parse_hermes,
    "llama3_json": _parse_llama3_json,
}
