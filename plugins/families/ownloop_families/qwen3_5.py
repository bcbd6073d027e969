"""Qwen3.5 (text): linear layers with a gated delta rule, every few layers attention with gated outputs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ownloop_families.shapes import (
    WITHOUT_CONTEXTS,
    MixtureShape,
    check_experts,
    read_experts,
    read_plain_rope,
    read_rotary_dim,
)
from ownloop_plan.sized_decoder import TensorSize
from rl.system.decoders import read_sizes, refuse_options
from rl.system.hf_config import ModelFamily
from trainer.config import TrainerConfig

CHUNK = 64
"""Tokens whose part of a delta rule is one product of matrices, here and in fla."""
FAMILY = ModelFamily(
    architectures=("Qwen3_5ForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families.qwen3_5:check",
    decoder="ownloop_families.qwen3_5:decoder",
    prepare="ownloop_families.gated_delta:by_documents",
    # vLLM keeps states of prefixes only with chunked prefill, which its CPU sampling does not allow.
    engine_args={"enable_prefix_caching": False},
    generator_ranks=1,
    prepare_process="ownloop_vision.image_prompts:prepare_process",
    patch_cpu="ownloop_families.routes:patch_routes",
    tiny="ownloop_families.qwen3_5:tiny",
)
MIXTURE = replace(
    FAMILY,
    architectures=("Qwen3_5MoeForCausalLM",),
    agreed={"hidden_act": "silu"},
    tiny="ownloop_families.qwen3_5:tiny_mixture",
)
_ACCEPTED = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False, "mlp_only_layers": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Shape(MixtureShape):
    """Layers of kind 0 have a delta rule, those of kind 1 attention; all have experts, or none has."""

    spec: ClassVar[str] = "ownloop_families.titan.qwen3_5:build_spec"
    proven: ClassVar[Mapping[str, object]] = WITHOUT_CONTEXTS

    attends: tuple[bool, ...]
    """For each layer, whether it has attention and not a delta rule."""
    rotary_dim: int
    """Dimensions of a head that rotary embeddings rotate, the first ones."""
    num_key_heads: int
    """Of a linear layer, as the sizes that follow."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Tokens that a convolution sees."""
    shared_hidden_dim: int
    """Hidden dimension of the shared expert; 0 without experts."""
    state_dtype: str
    """Of what a generator keeps of a delta rule; empty for its own dtype."""

    @property
    def values(self) -> int:
        """Dimensions of the values of all heads of a linear layer."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Dimensions of its queries, keys and values, over which the convolution goes."""
        return self.values + 2 * self.num_key_heads * self.key_head_dim

    @property
    def cut(self) -> Mapping[str, int]:
        """As `DecoderConfig.cut`: heads of delta rules, and the shared expert."""
        heads = {"linear_num_key_heads": self.num_key_heads, "linear_num_value_heads": self.num_value_heads}
        return {**heads, "shared_expert_intermediate_size": self.shared_hidden_dim}

    @property
    def shared_dim(self) -> int:
        """As `MixtureShape.shared_dim`."""
        return self.shared_hidden_dim

    @property
    def kinds(self) -> tuple[int, ...]:
        """1 for layers with attention."""
        return tuple(int(attends) for attends in self.attends)

    @property
    def num_attending(self) -> int:
        """Layers with attention."""
        return sum(self.attends)

    @property
    def state(self) -> tuple[int, int, str]:
        """As `SizedDecoder.state`: of delta rules, and the inputs of their convolutions."""
        count = self.num_layers - self.num_attending
        inputs = (self.kernel_size - 1) * self.channels
        return count * self.values * self.key_head_dim, count * inputs, self.state_dtype

    @property
    def rule_products(self) -> int:
        """As `SizedDecoder.rule_products`, in chunks of C tokens: 2 C (K + V) + 3 K V for each head.

        Of keys with keys and queries, and with new values; of the state, read twice and written once.
        """
        k, v = self.key_head_dim, self.value_head_dim
        of_layer = self.num_value_heads * (2 * CHUNK * (k + v) + 3 * k * v)
        return (self.num_layers - self.num_attending) * of_layer

    def attention(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.attention`."""
        yield TensorSize((self.dim,), "vector", 2)
        if kind:
            yield from self.projections(2 * self.queries)
            yield TensorSize((self.head_dim,), "vector", 2)
            return
        yield TensorSize((self.channels, self.dim), "matrix")
        yield TensorSize((self.values, self.dim), "matrix")
        yield TensorSize((self.num_value_heads, self.dim), "matrix", 2)
        yield TensorSize((self.channels, self.kernel_size), "vector")
        yield TensorSize((self.num_value_heads,), "vector", 2)
        yield TensorSize((self.value_head_dim,), "vector")
        yield TensorSize((self.dim, self.values), "matrix")

    def network(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.network`, with what the shared expert's output is multiplied by."""
        del kind
        yield from MixtureShape.network(self, 1)
        if self.moe is not None:
            yield TensorSize((1, self.dim), "whole")

    def kept(self, kind: int) -> int:
        """As `SizedDecoder.kept`. Norms, computed in float32, keep an input of twice the bytes.

        Of a delta rule as fla's kernels compute it: projections and the convolution over W tokens keep W + 1 times the
        channels. The kernels keep queries and keys of length 1, values, and a row of a chunk's matrix for each head.
        The gated norm keeps values and gates in float32.
        """
        others = 2 * self.dim + 4 * self.network_dim
        if kind:
            return others + 6 * self.queries + 4 * self.keys
        queries_and_keys = self.channels - self.values
        of_heads = self.num_value_heads * (CHUNK + 10)  # decays and betas, mostly in float32, are the ten
        return others + (self.kernel_size + 1) * self.channels + queries_and_keys + 10 * self.values + of_heads

    def kept_products(self, kind: int) -> int:
        """As `SizedDecoder.kept_products`."""
        return 3 * self.queries + self.keys if kind else self.channels + self.num_value_heads


def check(config: TrainerConfig, settings: Mapping[str, object]) -> None:
    """The row's `check`: experts in the layout."""
    check_experts(config, settings, decoder)


def decoder(config: Mapping[str, Any]) -> Qwen35Shape:
    """The shape, dense or with experts in every layer."""
    refuse_options(config, _ACCEPTED)
    has_experts = "num_experts" in config
    # Mixtures have no feed-forward network of their own, so their files need not say how large it would be.
    sizes = read_sizes({"head_dim": 256, **({"intermediate_size": 0} if has_experts else {}), **config})
    interval = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(sizes["num_layers"])
    ]
    return Qwen35Shape(
        family="qwen3_5",
        **sizes,
        rope_theta=read_plain_rope(config),
        rope_scaling=None,
        moe=read_experts(
            config,
            num_experts=int(config["num_experts"]),
            hidden_dim=int(config["moe_intermediate_size"]),
            normalize_scores=True,
        )
        if has_experts
        else None,
        attends=tuple(kind == "full_attention" for kind in kinds),
        rotary_dim=read_rotary_dim(config, sizes["head_dim"], 0.25),
        num_key_heads=int(config.get("linear_num_key_heads", 16)),
        num_value_heads=int(config.get("linear_num_value_heads", 32)),
        key_head_dim=int(config.get("linear_key_head_dim", 128)),
        value_head_dim=int(config.get("linear_value_head_dim", 128)),
        kernel_size=int(config.get("linear_conv_kernel_dim", 4)),
        shared_hidden_dim=int(config["shared_expert_intermediate_size"]) if has_experts else 0,
        state_dtype=str(config.get("mamba_ssm_dtype") or ""),
    )


_DELTA: Mapping[str, Any] = {
    "head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from ownloop_families.tiny import SHAPE, save_random

    return _centred(save_random(path, "Qwen3_5ForCausalLM", **{**SHAPE, **_DELTA}))


def tiny_mixture(path: Path) -> Path:
    """Writes a tiny random model with experts."""
    from ownloop_families.tiny import SHAPE, save_random

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    options: dict[str, Any] = {**SHAPE, **_DELTA, **experts, "shared_expert_intermediate_size": 64}
    return _spaced(_centred(save_random(path, "Qwen3_5MoeForCausalLM", **options)))


def _centred(path: Path) -> Path:
    """Subtracts 1 from the weights of norms that multiply by 1 + weight, so that they multiply by 0.5 to 1.5."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = {n: t - float("norm" in n and "linear_attn.norm" not in n) for n, t in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return path


def _spaced(path: Path) -> Path:
    """Writes a tokenizer of words with a space before them, since transformers loads one class for this model type.

    That class splits a text into bytes, of which the vocabulary has none. So words are added tokens.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from rl.tiny_models import VOCAB_SIZE

    words = [f" w{i}" for i in range(VOCAB_SIZE)]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    special = dict.fromkeys(("eos_token", "unk_token"), words[2])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0], **special).save_pretrained(path)
    return path
