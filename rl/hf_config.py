"""What a Hugging Face model directory holds, read without loading the model. The one reader of `config.json`.

Looks at `config.json`, the headers of the safetensors files and the names of the tokenizer's files, so that a wrong
directory is reported in milliseconds, before any process starts. Reads no weights and does not import transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl.model_files import check_head, weight_files

PROVEN_ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures for which tests compare trainer and generator after a pull."""

_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
"""How transformers names the classes of language models."""

_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The shape of a causal language model, by the names of its `config.json`."""

    path: Path
    architecture: str
    """A class of transformers, often one of `PROVEN_ARCHITECTURES`."""
    max_context: int
    """Tokens that prompt and completion may have together."""
    vocab_size: int
    tied: bool
    """Whether the output layer is the embedding matrix."""
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion."""
    weight_files: tuple[Path, ...]
    """The safetensors files, in the order of their names."""


def read_config(path: Path) -> Mapping[str, Any]:
    """The contents of a model directory's `config.json`. Raises ValueError if it is missing or not a JSON object."""
    return _read_json(path / "config.json", f"model directory {path} has no config.json")


def inspect_model(path: Path) -> ModelInfo:
    """Checks that `path` is a complete model directory that ownloop can train, and describes the model.

    Raises ValueError naming the directory, what is wrong with it and what is accepted.
    """
    if not path.is_dir():
        raise ValueError(f"model directory {path} does not exist or is not a directory")
    config = read_config(path)
    architecture = _architecture(path, config)
    files = weight_files(path)
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise ValueError(f"model directory {path} has no tokenizer; tokenizer.json or tokenizer.model is needed")
    check_head(path, tied=is_tied(config))
    num_attention_heads = _positive(path, config, "num_attention_heads")
    return ModelInfo(
        path=path,
        architecture=architecture,
        max_context=min(_positive(path, config, "max_position_embeddings"), longest_context(config)),
        vocab_size=_positive(path, config, "vocab_size"),
        tied=is_tied(config),
        hidden_size=_positive(path, config, "hidden_size"),
        num_layers=_positive(path, config, "num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=_positive(path, config, "num_key_value_heads", default=num_attention_heads),
        eos_token_ids=end_token_ids(path, config),
        weight_files=files,
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output layer is the embedding matrix."""
    # Gemma's files leave the key out because its models are always tied; elsewhere its absence means untied.
    always = any(name.startswith("Gemma") for name in config.get("architectures") or ())
    return bool(config.get("tie_word_embeddings", always))


def longest_context(config: Mapping[str, Any]) -> int:
    """The longest sequence whose log-probs trainer and generator agree on, in tokens.

    That is the model's context, and with rotary scaling that depends on a sequence's length ("longrope" of Phi 3 and 4,
    "dynamic") the context before scaling. Beyond it, vLLM scales every sequence and transformers only long ones.
    """
    # A model that states no limit takes sequences as long as fit into memory.
    longest: int = config.get("max_position_embeddings") or config.get("n_positions") or 1 << 20
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su", "dynamic"):
        return longest
    name = "original_max_position_embeddings"
    return min(longest, rope.get(name) or config.get(name) or longest)


def end_token_ids(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens at which a generator stops; `config` is what the model directory's `config.json` holds.

    Reads generation_config.json, which may name more end tokens than config.json, and falls back to the latter.
    """
    generation = path / "generation_config.json"
    value = _read_json(generation, "").get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def check_architecture(path: Path) -> None:
    """Raises ValueError, as `inspect_model` does, if `config.json` is of no model that ownloop can train.

    Looks at nothing else: the weights may still have to be fetched.
    """
    _architecture(path, read_config(path))


def _read_json(file: Path, missing: str) -> Mapping[str, Any]:
    """Reads a JSON object. Raises ValueError with the message `missing` if there is no such file."""
    if not file.is_file():
        raise ValueError(missing)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}; an object is needed")
    return cast("dict[str, Any]", value)


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    """The first architecture of a language model that the config names. Whether it fits, trainer and generator know."""
    named: list[str] = config.get("architectures") or []
    language_models = [name for name in named if name.endswith(_LM_SUFFIXES)]
    if not language_models:
        raise ValueError(
            f"model directory {path} is of architecture {', '.join(named) or '(none named)'}, which is no language "
            f"model; proven are {', '.join(PROVEN_ARCHITECTURES)}"
        )
    if "quantization_config" in config:
        raise ValueError(f"model directory {path} holds quantised weights; training needs them in bfloat16 or float32")
    return language_models[0]


def _positive(path: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads an integer that must be above 0."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{path / 'config.json'}: {key} is {value!r}; it must be an integer above 0")
    return value
