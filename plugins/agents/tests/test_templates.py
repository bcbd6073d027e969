"""The rule of splicing over TRL's chat templates: spliced, a branch, or refused by the template; never wrong.

TRL is not in the locked environment: `.venv/bin/uv pip install --no-deps trl==1.16.0` first.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ownloop_agents.splicing import EarlierCall, Message, digests, find_prompt
from rl.rollouts.tokenizer import TextEncoder

_SPEC = find_spec("trl")
FILES = [] if _SPEC is None else sorted(Path(str(_SPEC.origin)).parent.glob("chat_templates/*.jinja"))
TEMPLATES = [file for file in FILES if not file.stem.endswith("_training")]
CONTROL = re.compile(r"<\|[^|<>]*\|>|</?\w+>|<\uff5c[^<>]*\uff5c>|\[/?[A-Z_]+\]|<\|?[a-z_]+\|?>")
CONTROL_OR_LETTER = re.compile(f"{CONTROL.pattern}|.", re.DOTALL)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASKED: Any = {"role": "user", "content": "hello"}
MORE: Any = {"role": "user", "content": "more"}


def _calling(*numbers: int) -> list[Any]:
    return [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": "add", "arguments": {"a": n}}} for n in numbers
    ]


def _result(number: int) -> Any:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "add", "content": "3"}


SAID: Any = {"role": "assistant", "content": "the other"}
CASES: dict[str, tuple[list[Any], Any, list[Any], bool]] = {
    "user": ([ASKED], SAID, [MORE], False),
    "system": ([{"role": "system", "content": "be brief"}, ASKED], SAID, [MORE], False),
    "tool": ([ASKED], {"role": "assistant", "content": "", "tool_calls": _calling(1)}, [_result(1)], True),
    "two tools": (
        [ASKED],
        {"role": "assistant", "content": "", "tool_calls": _calling(1, 2)},
        [_result(1), _result(2)],
        True,
    ),
    "reasoning": ([ASKED], {**SAID, "reasoning_content": "hm"}, [MORE], False),
}
SPLICED = {"user": 33, "system": 32, "tool": 31, "two tools": 29, "reasoning": 24}
"""How many of the 41 templates let the next turn be exact: as many as leave the earlier text as it was."""
OWN_END = {"tool": 4, "two tools": 4}
"""Templates of Gemma 4, whose calls end with another token than answers do: without it, a branch begins."""


class Chat:
    """A template with a tokenizer of characters, of "th" and "ad", and of the control tokens that it writes."""

    def __init__(self, template: str, tools: bool) -> None:
        self._template, self._tools = template, [TOOL] if tools else None
        self.control: list[str] = []

    def know(self, text: str) -> None:
        """Makes the tokenizer for all that this text holds."""
        self.control = sorted({*CONTROL.findall(text), "<bos>", "<eos>"})
        letters = sorted({*CONTROL.sub("", text), *"thad"})
        vocab = {token: i for i, token in enumerate((*self.control, *letters, "th", "ad"))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("a", "d")]))
        tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.add_special_tokens(self.control)
        self.tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self.encoder = TextEncoder(self.tokenizer)
        self.stops: frozenset[int] = frozenset()

    def render(self, conversation: Sequence[Message], *, opened: bool) -> str:
        chat: Any = [dict(message) for message in conversation]
        special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        options: Any = {"tools": self._tools, "add_generation_prompt": opened, **special}
        return render_jinja_template([chat], chat_template=self._template, **options)[0][0]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)


def _turn(template: str, case: str, cut_off: bool) -> str:
    """How the next prompt came about, after it was compared with the text; "refused" if the template raises."""
    before, answer, more, tools = CASES[case]
    chat = Chat(template, tools)
    try:
        prompt = chat.render(before, opened=True)
        head = chat.render([*before, answer], opened=False)
        full = chat.render([*before, answer, *more], opened=True)
    except Exception:
        return "refused"
    chat.know(prompt + head + full)
    shown = head[len(prompt) :] if head.startswith(prompt) else "the other"
    ends = [match for match in CONTROL.finditer(shown) if not shown[match.end() :].strip()]
    closing = ends[-1] if ends else None
    said = shown if closing is None else shown[: closing.start() if cut_off else closing.end()]
    if closing is not None:
        chat.stops = frozenset(chat.encode(closing[0]))
    # Sampled letter by letter, as no tokenizer writes it: with the template's own tokens, nothing would need a splice.
    history = [
        *chat.encode(prompt),
        *(token for part in CONTROL_OR_LETTER.findall(said) for token in chat.encode(part)),
    ]
    call = EarlierCall(None, np.array(history, np.int32), digests([*before, answer], None)[-1])
    conversation = [*before, answer, *more]
    found = find_prompt(chat.encode(full), conversation, None, [call], chat)
    text = chat.tokenizer.decode(found.tokens, clean_up_tokenization_spaces=False)
    if found.parent is None:
        assert text == full
        return found.how
    assert list(found.tokens[: found.num_earlier]) == history
    rest = text.removeprefix(chat.tokenizer.decode(history, clean_up_tokenization_spaces=False))
    assert full.endswith(rest)
    new = full[len(head) :] if full.startswith(head) else rest
    assert rest.endswith(new)
    assert CONTROL.sub("", rest.removesuffix(new)).strip() == ""  # what is between closes the answer, and no more
    return found.how


@pytest.mark.skipif(not TEMPLATES, reason="needs trl")
@pytest.mark.parametrize("cut_off", [False, True], ids=["ended", "cut off"])
@pytest.mark.parametrize("case", CASES)
def test_a_public_template_is_never_spliced_wrongly(case: str, cut_off: bool) -> None:
    hows = {file.stem: _turn(file.read_text(), case, cut_off) for file in TEMPLATES}
    exact = sum(how in ("spliced", "extends") for how in hows.values())
    assert exact == SPLICED[case] - (OWN_END.get(case, 0) if cut_off else 0), hows
