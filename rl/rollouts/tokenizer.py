"""Loads a model's tokenizer without importing what no tokenizer needs."""

import json
from pathlib import Path
from typing import Any

from rl.hf_config import read_config
from rl.startup import without_garbage_collection
from rl.transformers_import import hasten_transformers

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
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
