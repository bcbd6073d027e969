"""One form of a chat in front of every chat template: the one that vLLM makes of the requests of its chat endpoint.

    a message as users, data files and SDKs write it           as the template sees it
    content: None, text, or a list of parts                    text; parts, for a template that reads parts
    tool_calls[].function.arguments: JSON text                 a mapping
    reasoning or reasoning_content                             both
    role "developer", which the template does not know         "system", in one message at the beginning

So rollouts, supervised training, references and the doors read the same tokens. Fields that vLLM does not know are left
out; a part that no template could show is refused.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2.nodes as nodes

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part that is text -> the field of the text."""
_UNREAD = "function_call", "audio", "refusal"  # fields of an answer that no chat template shows
_BILLING = "x-anthropic-billing-header"  # the line of a client that changes with every request; vLLM leaves it out, too
Message = Mapping[str, Any]


def as_shown(chat: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """The messages as vLLM gives them to this chat template. Raises ValueError for what no template can show."""
    messages = [_as_shown(message, template) for message in chat]
    if "'developer'" in template or '"developer"' in template or all(m["role"] != "developer" for m in messages):
        return messages
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            del message["tools"]
    of_system = [message for message in messages if message["role"] == "system"]
    if len(of_system) == 1 and messages[0] in of_system:
        return messages
    texts = [text for message in of_system if (text := text_of(message["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def text_of(content: Any) -> str:
    """The text of a content: of parts, that of each on a line of its own. Raises ValueError as `as_shown` does."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(text for part in content if (text := _text_of(part)))


def check_fields(message: Message) -> None:
    """Raises ValueError for fields of an answer that no chat template shows."""
    for name in _UNREAD:
        if message.get(name):
            raise ValueError(
                f"a message has a {name}, which no chat template shows; what was said belongs into content, and calls "
                "into tool_calls"
            )


def _as_shown(message: Message, template: str) -> dict[str, object]:
    role, content = message["role"], message.get("content")
    check_fields(message)
    parts: list[object] = [content] if isinstance(content, str) else [*(content or ())]
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing(part)) is not None]
    shown: dict[str, object] = {"role": role, "content": _content(parts, template, is_tool=role == "tool")}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if role == "developer":
        shown["tools"] = message.get("tools")
    kept = ("tool_call_id", "name", "task") if role == "tool" else ("name", "task")
    return shown | {name: message[name] for name in kept if message.get(name) is not None}


def _content(parts: Sequence[object], template: str, *, is_tool: bool) -> str | list[dict[str, Any]]:
    shown = [found for part in parts if (found := _part(part, template)) is not None]
    if all(isinstance(part, str) for part in shown) and (is_tool or not takes_parts(template)):
        return "\n".join(part for part in shown if part)  # an empty part is no line
    return [{"type": "text", "text": part} if isinstance(part, str) else dict(part) for part in shown]


def _part(part: Any, template: str) -> Any:
    """A part as this template sees it: its text, the part itself, or None if it is left out."""
    kind = cast("Message", part).get("type") if isinstance(part, Mapping) else None
    if kind == "tool_reference" and (not takes_parts(template) or kind in template):
        return part if takes_parts(template) else part["name"]
    return part if kind == "image" else _text_of(part)


def _text_of(part: object) -> str | None:
    if isinstance(part, str):
        return part
    fields = cast("Message", part) if isinstance(part, Mapping) else {}
    kind = fields.get("type", "text")
    text = fields.get(TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
    if isinstance(text, str) or (text is None and kind in ("text", "refusal")):
        return text
    raise ValueError(
        f"a message has a part of type {kind!r}, {part!r:.80}, which no chat template shows; parts are texts "
        f"({', '.join(TEXT_PARTS)}) and images"
    )


def _without_billing(part: object) -> object:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or not text.startswith(_BILLING):
        return part
    return text.partition("\n")[2] or None


def _call(call: object) -> dict[str, object]:
    """A tool call whose arguments are a mapping: an empty one for what is no JSON object."""
    fields = cast("Message", call) if isinstance(call, Mapping) else {}
    if not isinstance(function := fields.get("function"), Mapping):
        raise ValueError(
            f"a message has the tool call {call!r:.80}; each needs a 'function' with 'name' and 'arguments'"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = None
        except RecursionError:
            raise ValueError("the arguments of a tool call are nested too deeply") from None
    read = {"arguments": arguments if isinstance(arguments, Mapping) else {}, "name": function.get("name")}
    given = {**fields, "function": read}
    return {name: given[name] for name in ("id", "function", "type") if name in given}  # the order that vLLM reads


@functools.lru_cache(maxsize=32)
def takes_parts(template: str) -> bool:
    """Whether a chat template reads the parts of a content, by vLLM's rule: a loop of it goes over a message's content.

    False for a template that cannot be parsed, or assigns messages to more than one name at a time.
    """
    from transformers.utils import chat_template_utils  # with the tokenizer, which takes a second

    try:
        compiled = getattr(chat_template_utils, "_compile_jinja_template")(template)  # noqa: B009
        return _loops_over_content(compiled.environment.parse(template))
    except Exception:  # as vLLM
        return False


def _loops_over_content(tree: Any) -> bool:
    lists = ["messages"]
    for name in lists:  # which grows
        assigned = [each.target.name for each in tree.find_all(nodes.Assign) if _reads(each.node, name)]
        lists += [each for each in assigned if each not in lists]
    loops = [*tree.find_all(nodes.For)]
    said = {loop.target.name for loop in loops if any(_reads(loop.iter, name) for name in lists)}

    def reads_content(node: object) -> bool:
        return any(_reads(node, name, "content") for name in said)

    in_macros, given = set[int](), dict[int, set[str]]()
    for macro in tree.find_all(nodes.Macro):
        calls = [c for c in tree.find_all(nodes.Call) if isinstance(c.node, nodes.Name) and c.node.name == macro.name]
        names = [argument.name for argument in macro.args]
        contents = {
            name for call in calls for name, value in zip(names, call.args, strict=False) if reads_content(value)
        }
        contents |= {
            each.key for call in calls for each in call.kwargs if each.key in names and reads_content(each.value)
        }
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if contents:
                given[id(loop)] = contents
    for loop in loops:
        named = {loop.iter.name} if isinstance(loop.iter, nodes.Name) else set[str]()
        of_macro = given.get(id(loop), set()) if id(loop) in in_macros else {"content"}
        if reads_content(loop.iter) or named & of_macro:
            return bool(loop.target.name)
    return False


def _reads(node: Any, name: str, key: str | None = None) -> bool:
    """Whether an expression is this variable, or a key of it; filters, tests and slices do not count."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            found = node.arg.value if isinstance(node.arg, nodes.Const) else None
        else:
            found = node.attr if isinstance(node, nodes.Getattr) else None
        if found != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
