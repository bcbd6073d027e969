"""gpt-oss: sinks and windows in attention, biases everywhere, experts in every layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ownloop_families.shapes import WITHOUT_CONTEXTS, MixtureShape, Yarn, check_experts, read_experts, read_yarn
from ownloop_plan.sized_decoder import TensorSize
from rl.system.decoders import read_sizes, refuse_options, rope_parameters
from rl.system.hf_config import ModelFamily
from trainer.config import TrainerConfig

FAMILY = ModelFamily(
    architectures=("GptOssForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families.gpt_oss:check",
    decoder="ownloop_families.gpt_oss:decoder",
    patch_cpu="ownloop_families.routes:patch_routes",
    generator_ranks=1,
    tiny="ownloop_families.gpt_oss:tiny",
)
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Where a file states nothing."""
_ALPHA, _LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssShape(MixtureShape):
    """Attention with sinks, and experts with biases."""

    spec: ClassVar[str] = "ownloop_families.titan.gpt_oss:build_spec"
    proven: ClassVar[Mapping[str, object]] = WITHOUT_CONTEXTS

    windows: tuple[int | None, ...]
    """For each layer, how many tokens a query attends to, itself among them; None for all before it."""
    yarn: Yarn | None
    swiglu_alpha: float
    swiglu_limit: float

    def attention(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.attention`, with biases and sinks."""
        del kind
        yield TensorSize((self.dim,), "vector", 2)
        yield from self.projections(self.queries)
        yield from self.biases()
        yield TensorSize((self.dim,), "vector")
        yield TensorSize((self.num_heads,), "vector")

    def network(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.network`, with biases, of the router too."""
        assert self.moe is not None
        count = self.moe.num_experts
        yield from MixtureShape.network(self, kind)
        yield TensorSize((count,), "vector")
        yield TensorSize((count, 2 * self.moe.hidden_dim), "expert")
        yield TensorSize((count, self.dim), "expert")

    def cached_layers(self, max_model_len: int) -> float:
        """As `SizedDecoder.cached_layers`."""
        return sum(1.0 if window is None else min(1.0, window / max_model_len) for window in self.windows)

    def kept(self, kind: int) -> int:
        """As `SizedDecoder.kept`; gates and values are clamped."""
        return MixtureShape.kept(self, kind) + 2 * self.network_dim


def check(config: TrainerConfig, settings: Mapping[str, Any]) -> None:
    """The row's `check`: vLLM has one order of layers, one activation, and always YaRN."""
    rope = settings.get("rope_parameters") or {"rope_type": "yarn"}
    alternating = _alternating(settings["num_hidden_layers"])
    for key, found, agreed in (
        ("rope_type", rope.get("rope_type"), "yarn"),
        ("layer_types", settings.get("layer_types") or alternating, alternating),
        ("swiglu_alpha", settings.get("swiglu_alpha", _ALPHA), _ALPHA),
        ("swiglu_limit", settings.get("swiglu_limit", _LIMIT), _LIMIT),
    ):
        if found != agreed:
            raise ValueError(f"config.json: {key} is {found!r}; vLLM and transformers agree only on {agreed!r}")
    check_experts(config, settings, decoder)


def decoder(config: Mapping[str, Any]) -> GptOssShape:
    """The shape."""
    refuse_options(config, {"attention_bias": True, "hidden_act": "silu", "attention_dropout": 0.0})
    sizes = read_sizes(config)
    window = config.get("sliding_window")
    rope = rope_parameters(config) or _ROPE
    if "rope_type" not in rope:  # transformers scales or not, depending on where the base stands
        raise ValueError(f"config.json: rope_parameters is {rope} without rope_type; state it, 'yarn' or 'default'")
    return GptOssShape(
        family="gpt_oss",
        **sizes,
        rope_theta=float(rope.get("rope_theta", 150000.0)),
        rope_scaling=None,
        moe=read_experts(
            config,
            num_experts=int(config.get("num_local_experts", 128)),
            hidden_dim=sizes["hidden_dim"],
            normalize_scores=True,
        ),
        windows=tuple(
            window if kind == "sliding_attention" else None
            for kind in config.get("layer_types") or _alternating(sizes["num_layers"])
        ),
        yarn=read_yarn(rope, sizes["max_seq_len"]),
        swiglu_alpha=float(config.get("swiglu_alpha", _ALPHA)),
        swiglu_limit=float(config.get("swiglu_limit", _LIMIT)),
    )


def _alternating(num_layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from ownloop_families.tiny import SHAPE, WINDOW, save_random

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    options: dict[str, Any] = {**SHAPE, **experts, "sliding_window": WINDOW}
    return save_random(path, "GptOssForCausalLM", **options)
