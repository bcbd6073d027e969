"""Finds the call that a request continues, and makes a prompt of that call's exact tokens and the new messages' tokens.

A program sends its whole history as text with every request. To tokenise the text again gives other tokens than those
that were sampled: a word can be cut in several ways, and a tool call loses its spaces on the way through a parser. So
the earlier tokens are kept, and of the new text only the end is encoded:

    earlier call        <user>hi<end><assistant>     hello<end>                       read and sampled: kept as they are
    head                <user>hi<end><assistant>hello<end>\n                          the template, up to that answer
    full                <user>hi<end><assistant>hello<end>\n<user>more<end><assistant>    the template, whole request
    closing             <end>\n                       what the template puts after any answer
    the new prompt      the earlier call's tokens + encode(\n<user>more<end><assistant>)

This holds for any chat template whose `full` begins with its `head`, which ends with its `closing`. A template that
drops earlier reasoning writes another history, and a program that edits a message does so too: such a request begins a
new branch.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rl.rollouts.tokenizer import TextEncoder

How = Literal["root", "extends", "spliced", "rewritten"]
"""How a prompt came about. "root": it continues no earlier call. "extends": the template's own tokens begin with the
earlier call's. "spliced": the earlier call's tokens stand in the place of the template's. "rewritten": the messages
continue an earlier call, but the template now shows them in another way, so the call is a root."""
Message = Mapping[str, Any]
_TRUSTED_ROLES = ("system", "developer", "assistant")
_PROBE = "ownloop-answer"
"""An answer that shows how a template closes answers."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A finished call of a session, as far as later requests need it."""

    parent: int | None
    """Index of the call whose tokens come before."""
    tokens: NDArray[np.int32]
    """[N] the tokens that the call read after its parent's, and the sampled ones."""
    digest: str
    """Of the tools, of all messages of its request and of its answer; see `digests`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request, and where they come from."""

    tokens: tuple[int, ...]
    """[P] the whole prompt."""
    parent: int | None
    """The earlier call that the prompt begins with."""
    num_earlier: int
    """How many of the tokens are the parent's."""
    how: How


class Template(Protocol):
    """A model's chat template."""

    encoder: TextEncoder
    stops: frozenset[int]
    """Tokens at which sampling stops."""

    def render(self, conversation: Sequence[Message], *, opened: bool) -> str:
        """The conversation as text; `opened` for an answer to follow. Raises what the template raises."""
        ...


def whole_tokens(earlier: Sequence[EarlierCall], index: int) -> list[int]:
    """All tokens that a call read and sampled."""
    parts: list[NDArray[np.int32]] = []
    place: int | None = index
    while place is not None:
        parts.append(earlier[place].tokens)  # walks up to the root
        place = earlier[place].parent
    return np.concatenate(parts[::-1]).tolist()


def digests(conversation: Sequence[Message], context: object) -> list[str]:
    """[M + 1] for every number of messages, from 0, a digest of so many messages after `context`, such as tools.

    Two messages are the same if role, stripped text, reasoning and tool calls are: ids and the form of JSON do not
    count. Neighbouring messages of the assistant are one, because the Responses API sends an answer as several items.
    """
    base = _hash("", context)
    found, run = [base], None  # digests of messages up to here; a run of assistant messages is one
    for message in conversation:
        if message["role"] == "assistant":  # a template may show two answers in a row as one
            run = _merged(run, _plain(message))
            found.append(_hash(base, run))
        else:
            base = _hash(found[-1], _plain(message))
            found.append(base)
            run = None
    return found


def find_prompt(
    rendered: Sequence[int],
    conversation: Sequence[Message],
    context: object,
    earlier: Sequence[EarlierCall],
    template: Template | None,
) -> Prompt:
    """The prompt of a request. `rendered` are the tokens that the template alone gives; without `template`, nothing is
    spliced. `context` is what the digests of the earlier calls began with.
    """
    known = {call.digest: index for index, call in enumerate(earlier)}
    seen = digests(conversation, context)
    for num_messages in range(len(conversation) - 1, 0, -1):  # the longest known beginning first
        if (index := known.get(seen[num_messages])) is None:
            continue
        history = whole_tokens(earlier, index)
        if list(rendered[: len(history)]) == history:  # the template shows the history exactly as it was sampled
            return Prompt(tuple(rendered), index, len(history), "extends")
        tokens = None if template is None else _splice(history, conversation, num_messages, template)
        if tokens is None:
            # safer than a wrong splice: nothing of it is counted twice
            return Prompt(tuple(rendered), None, 0, "rewritten")
        return Prompt(tokens, index, len(history), "spliced")
    return _by_tokens(tuple(rendered), earlier)


def hide_control_tokens(conversation: Sequence[Message], encoder: TextEncoder) -> tuple[list[Message], dict[str, str]]:
    """The conversation, in which characters stand for control tokens that users and tools spell out, and what for."""
    hidden: dict[str, str] = {}
    used = json.dumps(conversation, default=str, ensure_ascii=False)
    shown = [
        message if message["role"] in _TRUSTED_ROLES else encoder.hide(message, hidden, used)
        for message in conversation
    ]
    return shown, hidden


def _by_tokens(rendered: tuple[int, ...], earlier: Sequence[EarlierCall]) -> Prompt:
    """The prompt as a continuation of the longest earlier call whose tokens it begins with, or as a root."""
    best, longest = None, 0
    for index in range(len(earlier)):
        history = whole_tokens(earlier, index)
        # a program may have cut messages, and still begin with these tokens
        if len(history) > longest and list(rendered[: len(history)]) == history:
            best, longest = index, len(history)
    return Prompt(rendered, best, longest, "root" if best is None else "extends")


def _splice(
    history: list[int], conversation: Sequence[Message], num_messages: int, template: Template
) -> tuple[int, ...] | None:
    """The history and the tokens of what the template shows after it; None if it shows the history in another way."""
    shown, hidden = hide_control_tokens(conversation, template.encoder)
    answered, last = shown[:num_messages], shown[num_messages - 1]
    # without tool calls, the template shows the content alone
    probe = {name: value for name, value in last.items() if name != "tool_calls"} | {"content": _PROBE}
    try:
        head = template.render(answered, opened=False)
        full = template.render(shown, opened=True)
        # what follows the probe is how answers are closed
        before, _, closing = template.render([*answered[:-1], probe], opened=False).rpartition(_PROBE)
    except Exception:  # a template may show a whole conversation and refuse its parts
        return None
    # the template shows earlier messages in another way now
    start = _start_of_new(head, full, closing if before else None, history[-1], template)
    if start is None or not full.startswith(head):
        return None
    return (*history, *template.encoder.rendered(full[start:], hidden, continues=True))


def _start_of_new(head: str, full: str, closing: str | None, last: int, template: Template) -> int | None:
    """Where the text after the history begins in `full`; None if that is not certain. `last` is the last sampled token.

    `closing` is what the template puts after an answer in words. An answer with tool calls may end in another way, and
    then only with the token that was sampled.
    """
    control = template.encoder.control_tokens
    end = control.get(last, "") if last in template.stops else ""
    if end and head.rstrip().endswith(end):  # the template ends the answer with the token that was sampled
        return head.rindex(end) + len(end)
    if closing is None or not head.endswith(closing):  # a closing that depends on the answer cannot be trusted
        return None
    start = len(head) - len(closing)
    if last not in template.stops:
        return start
    # The sampled token stands for the first control token of the closing: `<|endoftext|>` for `<|im_end|>`. Where there
    # is none, the next message may begin with it, as GLM's answers end with `<|user|>`.
    places = [(place, -len(text)) for text in control.values() if (place := head.find(text, start)) >= 0]
    if places:
        place, length = min(places)  # the earliest, and the longest of equal ones
        return place - length
    return len(head) + len(end) if end and full.startswith(end, len(head)) else start


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    calls = [_plain_call(call["function"]) for call in message.get("tool_calls") or ()]
    # templates strip, so whitespace at the ends does not count
    return {"role": message["role"], "content": content.strip(), "reasoning": reasoning.strip(), "calls": calls}


def _plain_call(function: Mapping[str, Any]) -> list[object]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        # a model wrote it; what is no JSON is compared as it stands
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function["name"], arguments]


def _merged(run: dict[str, Any] | None, plain: dict[str, Any]) -> dict[str, Any]:
    if run is None:
        return plain
    # texts and calls join; the role stays
    return {name: plain[name] if name == "role" else run[name] + plain[name] for name in plain}


def _hash(before: str, value: object) -> str:
    text = json.dumps([before, value], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
