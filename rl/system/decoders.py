"""The core's dense decoders: one table of families, and what is read from a `config.json` of one.

A row of `DENSE` is all there is to know of a family: how it is recognised, what its layers have that Llama's lack,
under which names its weights are stored, what is refused, and a tiny model for tests. The engine `torchtitan` builds a
`DecoderConfig`. Families of plug-ins have subclasses of it, see `rl.system.hf_config.ModelFamily`. Nothing here imports
torch, so a model is refused before any process starts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

CLASSIFIER_SUFFIX = "ForSequenceClassification"
"""How transformers names a backbone with a head called `score`, the form in which critics are exported."""
LM_SUFFIX = "ForCausalLM"
BEFORE_SCALING = "original_max_position_embeddings"
_ANY = "the engine 'fsdp2' trains others"
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACCEPTED: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFamily:
    """A family of dense decoders. Where a row says nothing, it is as Llama."""

    name: str
    architecture: str
    """A class of transformers."""
    model_type: str
    """Of transformers' configuration."""
    built_as: str = ""
    """The family whose layers torchtitan builds, often this one; empty where only engines over transformers train it.
    It is `DecoderConfig.family`, by which checkpoints know a shape."""
    qkv_bias: bool = False
    qk_norm: Literal["none", "before", "after"] = "none"
    """Whether queries and keys are normalised head by head, before they are rotated or after that."""
    norms_after: bool = False
    """Whether norms follow attention and the feed-forward network, instead of coming before them."""
    rotates: Literal["halves", "neighbours"] = "halves"
    """Which dimensions rotary embeddings pair."""
    stretches_base: bool = False
    """Whether rotary embeddings of the type "dynamic" have a fixed base, the stated one times a power of `alpha`."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """torchtitan's name of a module of a layer -> its name in checkpoints, where that is not Llama's."""
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of transformers' configuration that a file may leave out, where they are not Llama's."""
    accepted: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keys of `config.json` for whose other values torchtitan has no layer."""
    agreed: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keys that vLLM understands otherwise than transformers, except with this value."""
    tied: bool = True
    """Whether the tiny model's output projection is its embedding."""
    tiny: Mapping[str, object] = field(default_factory=dict[str, object])
    """Options of the tiny model, so that leaving out what the family has changes the logits."""


_HEADS = {"partial_rotary_factor": 1.0}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_WITH_BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
DENSE: tuple[DenseFamily, ...] = (
    DenseFamily(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        built_as="ernie4_5",
        rotates="neighbours",
        defaults={"head_dim": 128},
        accepted={"use_bias": False},
        agreed={**_HEADS, "use_bias": False},
    ),
    DenseFamily(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        built_as="exaone4",
        qk_norm="before",
        norms_after=True,
        names={"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"},
        accepted={"sliding_window": None},  # the larger models have windows, and full attention without positions
        agreed=_HEADS,
        tiny={"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    ),
    DenseFamily(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        tiny={
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
        },
    ),
    DenseFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        agreed={"use_bidirectional_attention": False},
        tiny={**_WINDOWS, "query_pre_attn_scalar": 24},
    ),
    DenseFamily(name="glm4", architecture="Glm4ForCausalLM", model_type="glm4", tied=False),
    DenseFamily(
        name="granite",
        architecture="GraniteForCausalLM",
        model_type="granite",
        tiny={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    DenseFamily(
        name="hunyuan",
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        built_as="hunyuan",
        qk_norm="after",
        names={"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"},
        stretches_base=True,
        agreed=_HEADS,
        tiny={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}},
    ),
    DenseFamily(name="llama", architecture="LlamaForCausalLM", model_type="llama", built_as="llama", agreed=_HEADS),
    DenseFamily(
        name="mistral",
        architecture="MistralForCausalLM",
        model_type="mistral",
        built_as="llama",
        accepted={"sliding_window": None},  # since v0.2 its models have none
        agreed=_HEADS,
        tiny={"sliding_window": None},
    ),
    DenseFamily(name="olmo2", architecture="Olmo2ForCausalLM", model_type="olmo2", tied=False),
    DenseFamily(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        tied=False,
        tiny=_WINDOWS,
    ),
    DenseFamily(name="phi3", architecture="Phi3ForCausalLM", model_type="phi3", tied=False, tiny={"sliding_window": 8}),
    DenseFamily(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        built_as="qwen2",
        qkv_bias=True,
        agreed=_HEADS,
    ),
    DenseFamily(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        built_as="qwen3",
        qk_norm="before",
        defaults={"head_dim": 128},
        agreed={**_HEADS, "attention_bias": False},
    ),
    DenseFamily(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        tied=False,
        tiny=_WITH_BIASES,
    ),
    DenseFamily(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        tiny={"no_rope_layers": [1, 0]},  # the second layer has no rotary embeddings
    ),
)


def find_dense(architectures: Sequence[str] | None) -> DenseFamily | None:
    """The row of the first of these architectures that has one. A classifier counts as its backbone."""
    rows = {row.architecture: row for row in DENSE}
    return next((rows[name] for each in architectures or () if (name := backbone(each)) in rows), None)


def backbone(architecture: str) -> str:
    """The language model's name of a classifier; any other name as it is."""
    is_classifier = architecture.endswith(CLASSIFIER_SUFFIX)
    return architecture.removesuffix(CLASSIFIER_SUFFIX) + LM_SUFFIX if is_classifier else architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 for long contexts (https://arxiv.org/abs/2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that replace the feed-forward network in every layer."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    """Hidden dimension of one expert."""
    normalize_scores: bool
    """Whether the scores of a token's experts are scaled to add up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder."""

    spec: ClassVar[str] = "trainer.engines.titan.model.specs:build_spec"
    """The function that makes torchtitan's spec of such a shape, as an importable name."""
    proven: ClassVar[Mapping[str, object]] = {}
    """Options of `TrainerConfig` for which only one value is proven with torchtitan."""
    identifies: ClassVar[bool] = True
    """Whether checkpoints know the model by its shape; otherwise by its whole `config.json`."""

    family: str
    vocab_size: int
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_seq_len: int
    """Longest sequence that the model accepts, in tokens (`max_position_embeddings`)."""
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    moe: ExpertsConfig | None

    @property
    def row(self) -> DenseFamily:
        """What its layers have that Llama's lack."""
        return next(row for row in DENSE if row.name == self.family)

    @property
    def cut(self) -> Mapping[str, int]:
        """Further sizes that tensor-parallel ranks need equal parts of, as `config.json` names them."""
        return {}


def parse_dense(config: Mapping[str, Any]) -> DecoderConfig:
    """The shape of a dense decoder that torchtitan builds, by the contents of its `config.json`.

    Both spellings of rotary embeddings are read. Raises ValueError naming the key, its value and what is supported.
    """
    row = find_dense(config.get("architectures"))
    if row is None or not row.built_as:
        built = ", ".join(each.architecture for each in DENSE if each.built_as)
        raise ValueError(
            f"config.json: architectures is {config.get('architectures') or []}; this engine's are {built}; {_ANY}"
        )
    sizes = read_sizes({**config, **{key: value for key, value in row.defaults.items() if config.get(key) is None}})
    refuse_options(config, {**_ACCEPTED, **row.accepted})
    rope_theta, rope_scaling = _read_rope(config, row, sizes["head_dim"])
    return DecoderConfig(family=row.built_as, **sizes, rope_theta=rope_theta, rope_scaling=rope_scaling, moe=None)


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that all decoders state by the same keys. Raises ValueError for a missing one."""
    for key in _REQUIRED:
        if key not in config:
            raise ValueError(f"config.json lacks {key!r}")
    num_heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "vocab_size": int(config["vocab_size"]),
        "dim": dim,
        "hidden_dim": int(config["intermediate_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or dim // num_heads),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": int(config.get("max_position_embeddings", 2048)),
    }


def refuse_options(config: Mapping[str, object], accepted: Mapping[str, object]) -> None:
    """Raises ValueError for a key with another value than the accepted one, where null is false; and if quantised."""
    for key, supported in accepted.items():
        value = config.get(key, supported)
        if value != supported and (value is not None or supported is True):
            raise ValueError(f"config.json: {key} is {value!r}; only {supported!r} is supported; {_ANY}")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is set; only unquantized weights can be trained")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary embeddings under the names of transformers 5, of a config in any spelling.

    As in transformers' `RotaryEmbeddingConfigMixin`, `rope_scaling` goes before `rope_parameters`, whose base is then
    not used either, and the length before scaling that stands beside them goes before the one in them. Gemma 3 has a
    set for each of two kinds of layers, and `rope_scaling` changes the one for full attention.
    """
    new: Mapping[str, Any] = config.get("rope_parameters") or {}
    old: Mapping[str, object] = config.get("rope_scaling") or {}
    if str(config.get("model_type")) == "gemma3_text":
        full = {**(new.get("full_attention") or {}), **old}
        return {**new, "full_attention": full} if full else dict(new)
    rope = dict(old or new)
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if rope.get("rope_type") in ("llama3", "yarn", "longrope"):
        length = config.get(BEFORE_SCALING) or rope.get(BEFORE_SCALING) or config.get("max_position_embeddings")
        rope[BEFORE_SCALING] = length
    return rope


def _read_rope(config: Mapping[str, object], row: DenseFamily, head_dim: int) -> tuple[float, Llama3RopeScaling | None]:
    rope = rope_parameters(config)
    theta = float(rope.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", "default")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if part != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor is {part!r}; only 1.0 is supported")
    if rope_type == "default":
        return theta, None
    if rope_type == "dynamic" and row.stretches_base and rope.get("alpha"):
        return theta * float(rope["alpha"]) ** (head_dim / (head_dim - 2)), None
    if rope_type == "llama3":
        fields = [each.name for each in dataclasses.fields(Llama3RopeScaling)]
        if lacking := [name for name in fields if not isinstance(rope.get(name), int | float)]:
            raise ValueError(f"config.json: rope_type is 'llama3' and {lacking[0]} is {rope.get(lacking[0])!r}")
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope[BEFORE_SCALING]),
        )
    raise ValueError(f"config.json: rope_type is {rope_type!r}; supported are 'default' and 'llama3'; {_ANY}")
