"""What a Hugging Face model directory holds, read without loading the model. The one reader of `config.json`.

Looks at `config.json`, the headers of the safetensors files and the names of the tokenizer's files, so that a wrong
directory is reported in milliseconds, before any process starts. Reads no weights and does not import transformers.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl.system.decoders import (
    BEFORE_SCALING,
    DENSE,
    LM_SUFFIX,
    DecoderConfig,
    backbone,
    find_dense,
    parse_dense,
    rope_parameters,
)
from rl.system.disk import read_json
from rl.system.model_files import INDEX_FILE, SINGLE_FILE, check_head, stored_shapes
from rl.system.plugins import load_all, why_absent

PROVEN_ARCHITECTURES = tuple(row.architecture for row in DENSE)
"""The core's architectures for which tests compare trainer and generator after a pull."""
_LM_SUFFIXES = (LM_SUFFIX, "LMHeadModel")
"""How transformers names the classes of language models."""
_STATED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Sizes without which a file describes no model, although transformers has values for them."""
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The names that families have for the number of a layer's experts."""
_OF_WHOLE = ("architectures", "tie_word_embeddings")
"""Settings of a model with several parts that its `text_config` may repeat with other values."""
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionParts:
    """What a family of models that read images brings to each process, as importable names "module:name"."""

    renderer: str
    """Of the controller: a class that is made of a model directory, `rl.rollouts.rendering.ImageRenderer`."""
    hidden: str
    """Of the trainer: a function that computes a row with images, `trainer.engines.hf.transformers_policy.Hidden`."""
    prompt: str
    """Of a generator: a function (tokens, images) -> the prompt that vLLM's engine takes."""
    tower: tuple[str, ...]
    """What the names of the vision parameters begin with in transformers."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Beginnings of parameters' names in transformers -> in checkpoints, where they differ."""
    adaptable: str = ""
    """Of a generator: a function of the settings -> vLLM's names of the projections that adapters may change."""
    split: str = ""
    """Of the trainer: a function (model, mesh) that divides the language model over tensor-parallel ranks, and returns
    the trained modules that each of them computes alike, blocks first. Only `fsdp2` calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models that a plug-in brings. An entry point of `ownloop.families` names this row."""

    architectures: tuple[str, ...]
    """As `config.json` names them; `PROVEN_ARCHITECTURES` are the core's."""
    engines: tuple[str, ...] = ("fsdp2",)
    """The engines that train it."""
    check: str = ""
    """A function (TrainerConfig, settings of `read_config`), as an importable name `module:function`, that raises
    ValueError for what is not proven. The controller imports it, so its module must not import torch."""
    decoder: str = ""
    """For the engine torchtitan: a function of settings that returns a `rl.system.decoders.DecoderConfig`,
    and raises ValueError for what is not proven. Like `check` it must not import torch."""
    agreed: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Keys of `config.json` that vLLM understands otherwise than transformers, except with this value."""
    prepare: str = ""
    """A function that changes a model of transformers in place, so that documents of a packed row stay apart. Its
    forward pass then gets `document_bounds`, see `trainer/engines/hf/document_kernel.py`."""
    engine_args: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Options of vLLM that the family needs, by their upstream names."""
    generator_ranks: int | None = None
    """The most ranks of one generator that are proven; None where vLLM's own limits hold."""
    prepare_process: str = ""
    """Of a generator: a function of the architecture's name, called before anything of vLLM is imported."""
    patch_cpu: str = ""
    """Of a generator on a CPU: a function that patches vLLM, called before the engine is built."""
    tiny: str = ""
    """A function of a directory that writes a tiny random model there, on which engines and loops are tried."""
    vision: VisionParts | None = None
    """Of a family that reads images; such a model need not be named a language model."""


def find_family(config: Mapping[str, Any]) -> ModelFamily | None:
    """The row of the first architecture that a `config.json` names; None for one that no installed plug-in has.

    A classifier is of its backbone's family. Raises ValueError for an architecture that a plug-in of ours has, saying
    how to install it.
    """
    named = backbone((config.get("architectures") or [""])[0])
    family = next((each for each in load_all("families", ModelFamily).values() if named in each.architectures), None)
    if family is None and named not in PROVEN_ARCHITECTURES and (reason := why_absent("families", named)):
        raise ValueError(f"config.json names the architecture {named}; {reason}")
    return family


def parse_decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """The shape of a decoder of the core or of a family, by the contents of its `config.json`.

    Raises ValueError naming the key, its value and what is supported.
    """
    family = find_family(config)
    return resolve_name(family.decoder)(config) if family and family.decoder else parse_dense(config)


def read_decoder_config(model: Path) -> DecoderConfig:
    """`parse_decoder_config` of a model directory. Raises ValueError also if `config.json` is missing or unreadable."""
    return parse_decoder_config(read_config(model))


def agreed_settings(config: Mapping[str, Any]) -> Mapping[str, object]:
    """Keys that vLLM understands otherwise than transformers, and the one value on which they agree."""
    found = find_family(config) or find_dense(config.get("architectures"))
    return {} if found is None else found.agreed


def vision_of(config: Mapping[str, object]) -> VisionParts | None:
    """What the model reads images with, by the settings that `read_config` returns; None for a model of text."""
    family = find_family(config)
    return None if family is None else family.vision


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """The name with the first of these beginnings that it has replaced, as in `VisionParts.renamed`."""
    start = next((start for start in beginnings if name.startswith(start)), "")
    return beginnings.get(start, "") + name.removeprefix(start)


def proven_architectures() -> tuple[str, ...]:
    """The architectures of the core and of installed plug-ins, sorted."""
    families = load_all("families", ModelFamily).values()
    return tuple(sorted({*PROVEN_ARCHITECTURES, *(name for family in families for name in family.architectures)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The settings of a checked model directory that a run needs before its processes start."""

    architecture: str
    """A class of transformers, often one of `proven_architectures`."""
    max_context: int
    """Tokens that prompt and completion may have together."""
    vocab_size: int


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The contents of a model directory's `config.json`. Raises ValueError if it is missing or not a JSON object."""
    if not (file := path / "config.json").is_file():
        raise ValueError(f"model directory {path} has no config.json")
    return read_json(file)


@contextlib.contextmanager
def understanding(path: Path) -> Generator[None]:
    """Within the block, a value of `config.json` that is missing, or of another kind, raises ValueError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"model directory {path}: config.json lacks {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"model directory {path}: config.json has a value of a wrong kind: {error}") from error


def read_config(path: Path) -> Mapping[str, Any]:
    """The settings of a model directory, as transformers understands its `config.json`.

    Absent keys have the values of the family's configuration class, except sizes that every file states. Rotary
    embeddings are in `rope_parameters` only. Raises ValueError as `read_config_file`, and for null where transformers
    takes none. The settings of a language model that is one part of a model (`text_config`) stand for the whole.
    """
    whole = read_config_file(path)
    of_whole = {key: whole[key] for key in _OF_WHOLE if key in whole}
    stated = {**whole, **(whole.get("text_config") or {}), **of_whole}
    fields = dict(config_fields(str(stated.get("model_type") or "")))
    if "num_local_experts" in stated and "num_experts" in fields:  # two spellings in Qwen3-MoE; this one goes first
        fields["num_local_experts"] = fields["num_experts"]
    for key, field in fields.items():
        if key in stated and stated[key] is None and not field.optional:
            accepted = "" if key in _STATED else f", or leave it out for {field.default!r}"
            raise ValueError(f"model directory {path}: {key} is null in config.json; give a value{accepted}")
    defaults = {key: field.default for key, field in fields.items() if key not in _STATED and key not in stated}
    if "num_local_experts" in stated:
        defaults.pop("num_experts", None)
    settings = {key: value for key, value in {**defaults, **stated}.items() if key not in _ROPE}
    if settings.get("quantization_config", True) is None:
        del settings["quantization_config"]
    if settings.get("num_key_value_heads", 0) is None:
        settings["num_key_value_heads"] = settings.get("num_attention_heads")
    rope = rope_parameters(stated)
    return {**settings, "rope_parameters": rope} if rope or "rope_parameters" in fields else settings


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A key of a family's configuration, as transformers declares it."""

    default: object
    optional: bool
    """Whether it may be null."""


@functools.cache
def config_fields(model_type: str) -> Mapping[str, ConfigField]:
    """The keys that transformers' configuration class of a model type declares with a constant; empty for others.

    The class is read as source: importing transformers takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    name = model_type.replace("-", "_").removesuffix("_text")
    if spec is None or spec.origin is None or not name.isidentifier():
        return {}
    file = Path(spec.origin).parent / "models" / name / f"configuration_{name}.py"
    tree = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        plain = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
        if any(ast.unparse(each.targets[0]) == "model_type" and each.value.value == model_type for each in plain):  # pyright: ignore[reportAttributeAccessIssue]
            return dict(_fields(node))
    return {}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ConfigField]]:
    """The fields of a class whose defaults are constants, or products of constants."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
            factors = [each.value.left, each.value.right] if isinstance(each.value, ast.BinOp) else [each.value]
            if all(isinstance(factor, ast.Constant) for factor in factors):
                values = [ast.literal_eval(factor) for factor in factors]
                default = values[0] if len(values) == 1 else math.prod(values)
                yield each.target.id, ConfigField(default, optional="None" in ast.unparse(each.annotation))


def inspect_model(path: Path) -> ModelInfo:
    """Checks that `path` is a complete model directory that ownloop can train, and describes the model.

    Raises ValueError naming the directory, what is wrong with it and what is accepted.
    """
    if not path.is_dir():
        raise ValueError(f"model directory {path} does not exist or is not a directory")
    config = read_config(path)
    architecture = _architecture(path, config)
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise ValueError(f"model directory {path} has no tokenizer; tokenizer.json or tokenizer.model is needed")
    check_head(path, tied=is_tied(config))
    end_token_ids(path, config)
    for key in (*_NEEDED, *({"num_key_value_heads"} & config.keys())):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path / 'config.json'}: {key} is {value!r}; it must be an integer above 0")
    context = min(config["max_position_embeddings"], longest_context(config))
    return ModelInfo(architecture=architecture, max_context=context, vocab_size=config["vocab_size"])


def num_experts(config: Mapping[str, Any]) -> int:
    """How many experts each layer chooses from, by the settings that `read_config` returns; 0 for a dense model."""
    found = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    return int(found) if found > 1 else 0


def experts_of(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Layers, experts of a token, and experts to choose from, of a mixture all of whose layers have some; else None."""
    count = 0 if config.get("first_k_dense_replace") else num_experts(config)
    return (config["num_hidden_layers"], config.get("num_experts_per_tok") or 0, count) if count else None


def trained_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that are trained and served, by the model directory's files and settings.

    The layers that predict further tokens (`num_nextn_predict_layers`), which follow the others, are left out: neither
    transformers nor vLLM computes them. Raises ValueError as `weight_files` and `read_config_file` do.
    """
    stored, config = stored_shapes(path), read_config_file(path)
    first = config.get("num_hidden_layers") or 0
    count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    further = tuple(f"model.layers.{first + index}." for index in range(count))
    return {name: shape for name, shape in stored.items() if not name.startswith(further)}


def is_tied(config: Mapping[str, object]) -> bool:
    """Whether the output layer is the embedding matrix, by the settings that `read_config` returns."""
    return bool(config.get("tie_word_embeddings", False))


def longest_context(config: Mapping[str, Any]) -> int:
    """The longest sequence whose log-probs trainer and generator agree on, in tokens.

    That is the model's context, and with rotary scaling that depends on a sequence's length ("longrope" of Phi 3 and 4,
    "dynamic") the context before scaling. Beyond it, vLLM scales every sequence and transformers only long ones.
    """
    # A model that states no limit takes sequences as long as fit into memory.
    longest: int = config.get("max_position_embeddings") or config.get("n_positions") or 1 << 20
    rope = rope_parameters(config)
    if rope.get("rope_type") not in ("longrope", "su", "dynamic"):
        return longest
    return min(longest, rope.get(BEFORE_SCALING) or config.get(BEFORE_SCALING) or longest)


def end_token_ids(path: Path, config: Mapping[str, object]) -> tuple[int, ...]:
    """The tokens at which a generator stops; `config` is what the model directory's `config.json` holds.

    Reads generation_config.json, which may name more end tokens than config.json, and falls back to the latter.
    """
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"model directory {path}: eos_token_id is {value!r}; it must be a token id, or a list of them")
    return tuple(ids)


def check_architecture(path: Path, *, as_published: bool = False) -> None:
    """Raises ValueError, as `inspect_model` does, if `config.json` is of no model that ownloop can train.

    Looks at nothing else: the weights may still have to be fetched. With `as_published`, they may be quantised, and the
    language model one part of the model.
    """
    config = read_config(path)
    if not (as_published and config.get("text_config")):
        _architecture(path, {**config, "quantization_config": None} if as_published else config)


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    """The first architecture of a language model that the config names. Whether it fits, trainer and generator know."""
    named: list[str] = config.get("architectures") or []
    reads_images = vision_of(config) is not None
    language_models = [name for name in named if reads_images or name.endswith(_LM_SUFFIXES)]
    if not language_models:
        part = "`ownloop model NAME --text-only DIR` writes the one that it contains"
        raise ValueError(
            f"model directory {path} is of architecture {', '.join(named) or '(none named)'}, which is no language "
            f"model; {part if config.get('text_config') else 'proven are ' + ', '.join(proven_architectures())}"
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"model directory {path} holds quantised weights; training needs them in bfloat16 or float32, and "
            "`ownloop model NAME --dequantize DIR` writes them so"
        )
    if named_file := config.get("transformers_weights"):  # vLLM does not look at it
        raise ValueError(
            f"model directory {path}: transformers_weights is {named_file!r} in config.json; leave it out and name the "
            f"weights {SINGLE_FILE}, or {INDEX_FILE} and the files in it"
        )
    return language_models[0]
