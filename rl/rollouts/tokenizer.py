"""Loads a model's tokenizer without importing what no tokenizer needs, and decodes what a model sampled."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.hf_config import read_config
from rl.startup import without_garbage_collection
from rl.transformers_import import hasten_transformers
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
    hasten_transformers()
    with without_garbage_collection():
        import transformers

        if _names_a_plain_class(model):
            return transformers.PreTrainedTokenizerFast.from_pretrained(model)
        return transformers.AutoTokenizer.from_pretrained(model)


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
