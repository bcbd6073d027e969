"""Loads a model's tokenizer without needless imports, encodes text, and decodes what a model sampled."""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rl.system.hardware import without_garbage_collection
from rl.system.hf_config import read_config
from rl.types import REASONING

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_TURNS = tuple({"role": role, "content": "-"} for role in ("user", "assistant", "user"))
_MODEL_TYPES_OF_PLAIN_CLASSES = ("llama", "qwen3", "qwen3_moe")
"""Model types for which `AutoTokenizer` believes a directory that names one of these classes."""


def load_tokenizer(model: Path) -> Any:
    """The tokenizer that `AutoTokenizer` loads from a Hugging Face directory.

    `AutoTokenizer` imports the code of transformers' models first, which takes four seconds of a processor while the
    trainer and the generator need it. Most directories name a class that can be loaded directly.
    """
    with without_garbage_collection():
        import transformers

        if _names_a_plain_class(model):
            return transformers.PreTrainedTokenizerFast.from_pretrained(model)
        return transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)  # or it asks at the terminal


def _names_a_plain_class(model: Path) -> bool:
    config_file = model / "tokenizer_config.json"
    if not config_file.is_file() or not (model / "tokenizer.json").is_file():
        return False
    config = json.loads(config_file.read_text(encoding="utf-8"))
    return (
        config.get("tokenizer_class") in _PLAIN_CLASSES
        and "auto_map" not in config
        and read_config(model).get("model_type") in _MODEL_TYPES_OF_PLAIN_CLASSES
    )


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What a model sampled, as an environment reads it.

    Special tokens that say something are part of the text, such as `<think>` or `<tool_call>` in some tokenizers. Those
    that begin, end or pad a text, and those between the turns of the chat template, are not.
    """
    if said_tokens(tokenizer).isdisjoint(tokens):
        return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    silent = special_tokens(tokenizer).keys() - said_tokens(tokenizer)
    shown = [token for token in tokens if token not in silent]
    return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> text of each token that decoding leaves out if told so."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: str(token) for number, token in added.items() if token.special}


@functools.lru_cache(maxsize=4)
def said_tokens(tokenizer: Any) -> frozenset[int]:
    """The special tokens that `text_of` shows."""
    kinds = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    borders = {getattr(tokenizer, f"{kind}_token_id", None) for kind in kinds}
    try:
        chat = str(tokenizer.apply_chat_template([*_TURNS], tokenize=False, add_generation_prompt=True))
    except Exception:  # no template, or one that refuses this chat
        chat = ""
    delimiters = " ".join([*REASONING, *REASONING.values()])
    return frozenset(
        number
        for number, text in special_tokens(tokenizer).items()
        if number not in borders and (text in delimiters or text not in chat)
    )


class TextEncoder:
    """Turns text into tokens at three places: where a sequence begins, after other text, and in a rendered chat."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is what `load_tokenizer` returns."""
        self._tokenizer = tokenizer
        self.control_tokens = special_tokens(tokenizer)
        """Id -> text of the tokens that structure a sequence and are no text."""

    def beginning(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that begins a sequence: once with the tokenizer's start tokens, without its end tokens.

        The text may begin with the start tokens itself.
        """
        tokens, start = self._encode(text), self._start_tokens
        return tokens if tokens[: len(start)] == start else start + tokens

    def continuation(self, text: str, *, plain: bool = False) -> tuple[int, ...]:
        """The tokens of a text that follows other text. With `plain`, control tokens in it are text like all other.

        Some tokenizers (Llama 2, Mistral 7B) put a space in front of every text, which does not belong between two. So
        a character is put there, and its tokens are left out. If the text's first token swallows the character, the
        text is encoded alone.
        """
        for character in "a1" if self._tokenizer.is_fast else "":
            tokens, places = self._encode_with_places(character + text, plain=plain)
            if not any(start < 1 < end for start, end in places):
                return tuple(token for token, (start, _) in zip(tokens, places, strict=True) if start >= 1)
        return self._encode(text, plain=plain)

    def rendered(self, text: str, hidden: Mapping[str, str], *, continues: bool = False) -> tuple[int, ...]:
        """The tokens of a chat, or of one's end, which `continues` other text.

        `hidden` maps characters in it to the texts of control tokens: see `hide`. A stretch between two control tokens
        that holds such a text is encoded as plain text.
        """
        if not any(character in text for character in hidden):
            return self.continuation(text) if continues else self._encode(text)
        tokens: list[int] = []
        begin = 0  # of the stretch, among the characters
        stretch: list[int] = []
        found, places = self._encode_with_places(text)
        for token, (start, end) in [*zip(found, places, strict=True), (None, (len(text), len(text)))]:
            # The stand-in for a control token may be unknown, and `<unk>` is a control token itself.
            if token is not None and text[start:end].strip() != self.control_tokens.get(token):
                stretch.append(token)
                continue
            shown = _replace(text[begin:start], hidden)
            if shown != text[begin:start] or (begin == 0 and continues):
                stretch = [*self._plain(shown, continues=begin > 0 or continues)]
            tokens += stretch if token is None else [*stretch, token]
            begin, stretch = end, []
        return tuple(tokens)

    def _plain(self, text: str, *, continues: bool) -> tuple[int, ...]:
        """The tokens of text in which control tokens are spelled out."""
        tokens = self.continuation(text, plain=True) if continues else self._encode(text, plain=True)
        if self._num_control(tokens) == 0:
            return tokens
        # Unigram models have control tokens among their pieces. Cut behind its first character, no piece matches one.
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
        first = self.continuation(parts[0], plain=True) if continues else self._encode(parts[0], plain=True)
        cut = (*first, *(token for part in parts[1:] for token in self.continuation(part, plain=True)))
        return cut if self._num_control(cut) < self._num_control(tokens) else tokens

    def _num_control(self, tokens: Sequence[int]) -> int:
        return sum(token in self.control_tokens for token in tokens)

    def hide(self, value: object, hidden: dict[str, str], used: str) -> Any:
        """The value, in whose strings a character stands for each text of a control token. Adds these to `hidden`.

        They are characters for private use that do not occur in `used`. Lists and mappings are searched through.
        """
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _stand_in(match[0], hidden, used), value)
        if isinstance(value, Mapping):
            items = cast("Mapping[str, object]", value).items()
            return {name: self.hide(item, hidden, used) for name, item in items}
        if isinstance(value, list | tuple):
            return [self.hide(item, hidden, used) for item in cast("Sequence[object]", value)]
        return value

    def _encode(self, text: str, *, plain: bool = False) -> tuple[int, ...]:
        options = {"split_special_tokens": True} if plain else {}
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, **options))

    def _encode_with_places(self, text: str, *, plain: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of the text, and the first character of each and the one after its last."""
        options = {"split_special_tokens": True} if plain else {}
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **options)
        return encoding["input_ids"], encoding["offset_mapping"]

    @functools.cached_property
    def _start_tokens(self) -> tuple[int, ...]:
        encoding = self._tokenizer("a", return_special_tokens_mask=True)
        marks: list[int] = encoding["special_tokens_mask"]
        return tuple(encoding["input_ids"][: marks.index(0)]) if 0 in marks else ()

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control_tokens.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _stand_in(text: str, hidden: dict[str, str], used: str) -> str:
    for character, hides in hidden.items():
        if hides == text:
            return character
    free = (chr(number) for number in range(0xF0000, 0xFFFFE))  # a plane of characters for private use
    character = next(character for character in free if character not in used and character not in hidden)
    hidden[character] = text
    return character


def _replace(text: str, hidden: Mapping[str, str]) -> str:
    for character, hides in hidden.items():
        text = text.replace(character, hides)
    return text
