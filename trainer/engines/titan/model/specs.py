"""torchtitan's spec of a dense decoder, whatever its row in `rl.system.decoders` says, laid out as its checkpoints are.

As in transformers, query, key and value projections are separate and rotary embeddings rotate the same dimensions. So
every parameter is that of the checkpoint under another name, and nothing has to be fused, permuted or converted on
load, push or export. Only experts are stacked.

A `Policy` is torchtitan's decoder as policy or critic: its forward pass ends in log-probs of target tokens, or in
values. Scoring is part of the model's forward pass, so that FSDP gathers the output projection
once for all chunks and frees it like any other parameter.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Embedding, Linear, QKVLinear, RMSNorm, RoPE
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from rl.data.packing import Document
from rl.system.decoders import DecoderConfig
from rl.types import Head
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.hf_directory import VALUE_HEAD, load_hf_weights, unstacked
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values
from trainer.engines.pytorch.low_rank import Adaptable
from trainer.engines.titan.model.attention import HFRoPE, NeighbourRoPE, NormsRotated, attention_masks

# Every parameter is loaded from a checkpoint, so none is initialized.
NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}

# torch's wrapper of recomputed layers adds this to the names of parameters and buffers, but not in a state dict.
_RECOMPUTED = "_checkpoint_wrapped_module."
_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\w+)\.weight")
HF_LAYER_NAMES = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "moe.router.gate": "mlp.gate",
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.gate_proj.weight",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.down_proj.weight",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.up_proj.weight",
}
"""Of a layer's modules, or of parameters by their whole names. That of a stack lacks the number of the expert."""
_HF_ROOT_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}


class NormsAfterBlock(Qwen3TransformerBlock):
    """A layer whose norms follow attention and the feed-forward network."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """Same fields as `Qwen3TransformerBlock.Config`."""

    def forward(self, x: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]"""
        x = x + self.attention_norm(self.attention(x, attention_masks, positions))
        return x + self.ffn_norm(self.feed_forward(x))


def build_spec(config: DecoderConfig, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    layers = [_layer(config, inner_attention) for _ in range(config.num_layers)]
    return model_spec(config, head, DensePolicy, layers, parallelize_qwen3, names=config.row.names)


def model_spec(
    config: DecoderConfig,
    head: Head,
    policy: type[Decoder],
    layers: list[Any],
    parallelize: Callable[..., object],
    **options: Any,
) -> ModelSpec:
    """The spec of a `policy` of these layers, which `parallelize` distributes; `options` are the policy's own."""
    lm_head = (
        LogprobHead.Config(in_features=config.dim, out_features=config.vocab_size, param_init=NO_INIT)
        if head == "lm"
        else ValueHead.Config(in_features=config.dim, out_features=1, param_init=NO_INIT)
    )
    model = policy.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tie_embeddings and head == "lm",
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim, param_init=NO_INIT),
        norm=norm_config(config, config.dim),
        lm_head=lm_head,
        layers=layers,
        **options,
    )
    return ModelSpec(
        name=config.family,
        flavor="hf",
        model=model,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def _layer(config: DecoderConfig, inner_attention: Module.Config) -> TransformerBlock.Config:
    block_class = NormsAfterBlock if config.row.norms_after else Qwen3TransformerBlock
    return block_class.Config(
        **norms(config),
        attention=attention_config(config, inner_attention),
        feed_forward=feed_forward(config, config.hidden_dim),
    )


def attention_config(config: DecoderConfig, inner_attention: Module.Config) -> GQAttention.Config:
    """Attention as the family's row says."""
    row = config.row
    qk_norm, qkv_bias = row.qk_norm != "none", row.qkv_bias
    attention = gqa_config(config, inner_attention, rope=_rope(config), qk_norm=qk_norm, qkv_bias=qkv_bias)
    if row.qk_norm == "after":
        return NormsRotated.Config(**{each.name: getattr(attention, each.name) for each in fields(attention)})
    return attention


def gqa_config(
    config: DecoderConfig, inner_attention: Module.Config, *, rope: RoPE.Config, qk_norm: bool, qkv_bias: bool
) -> GQAttention.Config:
    """Grouped-query attention."""
    attention = make_gqa_config(
        dim=config.dim,
        n_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        wqkv_param_init=NO_INIT,
        wo_param_init=NO_INIT,
        inner_attention=inner_attention,
        fuse_qkv=False,
        rope=rope,
        qk_norm=norm_config(config, config.head_dim) if qk_norm else None,
    )
    assert isinstance(attention.qkv_linear, QKVLinear.Config)
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = qkv_bias
    return attention


def norm_config(config: DecoderConfig, size: int) -> RMSNorm.Config:
    """A norm of vectors of this size."""
    return RMSNorm.Config(normalized_shape=size, eps=config.norm_eps, param_init=NO_INIT)


def norms(config: DecoderConfig) -> dict[str, Any]:
    """The two norms of a layer."""
    return {name: norm_config(config, config.dim) for name in ("attention_norm", "ffn_norm")}


def feed_forward(config: DecoderConfig, hidden_dim: int) -> FeedForward.Config:
    """A feed-forward network of this hidden dimension."""
    return make_ffn_config(dim=config.dim, hidden_dim=hidden_dim, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT)


def _rope(config: DecoderConfig) -> HFRoPE.Config:
    rope_class = NeighbourRoPE if config.row.rotates == "neighbours" else HFRoPE
    rope = rope_class.Config(dim=config.head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta)
    if (scaling := config.rope_scaling) is not None:
        rope.scaling = "llama"
        rope.scaling_factor = scaling.factor
        rope.low_freq_factor = scaling.low_freq_factor
        rope.high_freq_factor = scaling.high_freq_factor
        rope.original_max_position_embeddings = scaling.original_max_position_embeddings
    return rope


def share_rope_cache(parts: Sequence[nn.Module]) -> None:
    """Makes all layers share one table of cosines and sines. torchtitan gives each layer its own."""
    layers = [layer for part in parts for layer in part.modules() if isinstance(layer, RoPE)]
    for rope in layers[1:]:
        rope.cache = layers[0].cache


def named_parameters(parts: Sequence["Policy"]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every parameter once, by `hf_name`. A tied `lm_head.weight` goes by `model.embed_tokens.weight`."""
    for part in parts:
        heads = {f"{name}.weight" for name, module in part.named_modules() if isinstance(module, ValueHead)}
        for name, parameter in part.named_parameters():
            yield VALUE_HEAD if name in heads else part.hf_name(name), parameter


def named_buffers(parts: Sequence["Policy"]) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that checkpoints hold, such as a router's selection bias."""
    for part in parts:
        persistent = part.state_dict().keys()
        named = ((name.replace(_RECOMPUTED, ""), buffer) for name, buffer in part.named_buffers())
        yield from ((part.hf_name(name), buffer) for name, buffer in named if name in persistent)


def expert_views(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor under its Hugging Face name, or of a stack the experts of which this rank holds a part.

    `tensor` is a stack if its name is `model.layers.{layer}.mlp.experts.{projection}.weight`. Experts are views of it.
    """
    if (match := _STACK.fullmatch(name)) is None:
        yield name, tensor
        return
    for index, expert in unstacked(tensor):
        yield f"{match[1]}.{index}.{match[2]}.weight", expert


def load_weights(parts: Sequence["Policy"], path: Path) -> None:
    """Fills parameters and buffers as `load_hf_weights` does."""
    named = ((name, parameter.data) for name, parameter in named_parameters(parts))
    stored = {name: part for stack in named for name, part in expert_views(*stack)}
    load_hf_weights({**stored, **dict(named_buffers(parts))}, path)


class LogprobHead(Adaptable, Linear):
    """A `Linear` whose forward pass returns log-probs instead of logits."""

    hidden_gradient: Placement = Partial()
    """Placement of the hidden states' gradient over tensor-parallel ranks: a sum over their parts of the vocabulary."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, *, entropy: bool, distribution: Distribution
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S, D], targets [S] -> log-probs [S] float32, entropies [S] float32 if asked for."""
        return logprobs_and_entropy(
            *(hidden, self.weight, targets), entropy=entropy, low_rank=self.low_rank, distribution=distribution
        )


class ValueHead(Linear):
    """A `Linear` with one output, the value of a position. Every tensor-parallel rank computes the same."""

    hidden_gradient: Placement = Replicate()
    """As `LogprobHead.hidden_gradient`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor, *, entropy: bool, distribution: Distribution
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S, D] -> values [S] float32, and None because a value head has no entropies."""
        del targets, entropy, distribution
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return values(hidden, weight), None


def shard_head_only(head: Linear.Config) -> None:
    """Leaves an output projection's weight sharded by rows, and a value head's whole.

    Inputs and outputs stay plain tensors: the head itself deals with tensor parallelism.
    """
    assert head.sharding_config is not None
    head.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.I)}
        if isinstance(head, ValueHead.Config)
        else head.sharding_config.state_shardings
    )


class Policy(Decoder):
    """A decoder that scores: the forward pass, and what a family may change."""

    hf_layer_names: Mapping[str, str] = HF_LAYER_NAMES
    shares_prefixes: ClassVar[bool] = True
    """Whether its attention computes documents with suffixes."""

    # Upstream's switch for losses that apply the output projection themselves; here `forward` does.
    _skip_lm_head = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Tensor,
        positions: Tensor,
        attention_masks: Any,
        *,
        scored: Tensor,
        targets: Tensor,
        entropy: bool,
        distribution: Distribution,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection. A value head returns values [S] float32 and None. In a pipeline, every stage but the first
        takes hidden states [1, L, D] instead of tokens, and every stage but the last returns them.
        """
        hidden = super().forward(tokens, positions, attention_masks)
        if self.lm_head is None:
            return hidden
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local(grad_placements=[self.lm_head.hidden_gradient])
        hidden = hidden.squeeze(0).index_select(0, scored)
        return self.lm_head(hidden, targets, entropy=entropy, distribution=distribution)

    def plan(self, positions: Tensor, documents: Sequence[Document], compute_dtype: torch.dtype) -> Any:
        """What the attention of all layers needs to know about a row with positions [1, L]."""
        return attention_masks(positions, documents, compute_dtype)

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a parameter, or of a buffer that checkpoints hold."""
        name = name.replace(_RECOMPUTED, "")
        if (match := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)) is not None:
            return f"model.layers.{match[1]}.{self.hf_layer_names[match[2]]}{match[3] or ''}"
        return f"{_HF_ROOT_NAMES[name.removesuffix('.weight')]}.weight"


class DensePolicy(Policy, Qwen3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A dense decoder, or one with experts, that scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """`names` are the family's own, where they are not in `HF_LAYER_NAMES`."""

        names: Mapping[str, str] = field(default_factory=dict[str, str])

        def update_from_config(self, *, config: object, **kwargs: object) -> None:
            """Sets how every parameter and activation is sharded."""
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            shard_head_only(self.lm_head)

    def __init__(self, config: Config) -> None:
        """Builds it."""
        super().__init__(config)
        self.hf_layer_names = {**HF_LAYER_NAMES, **config.names}
