"""torchtitan model specs for the Llama, Qwen2 and Qwen3 families, laid out exactly like the Hugging Face checkpoints.

As in transformers, query, key and value projections are separate and rotary embeddings rotate halves. So every
parameter is that of the checkpoint under another name, and nothing has to be fused, permuted or converted on load, push
or export. Only experts are stacked; `experts.py` unstacks them.

`LlamaPolicy` and `Qwen3Policy` are torchtitan's decoders as policies or critics: their forward pass ends in log-probs
of target tokens, or in values. Scoring is part of the model's forward pass, so that FSDP gathers the output projection
once for all chunks and frees it like any other parameter.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, QKVLinear, RMSNorm, RoPE
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from rl.data.packing import Document
from rl.types import Head
from trainer.engines.decoder_config import DecoderConfig, Llama3RopeScaling
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.hf_directory import VALUE_HEAD, load_hf_weights, scale_llama3, unstacked
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values
from trainer.engines.pytorch.low_rank import Adaptable
from trainer.engines.titan.model.attention import attention_masks

# Every parameter is loaded from a checkpoint, so none is initialized.
NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}
_WITHOUT_QK_NORM = ("llama", "qwen2")

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


class HFRoPE(CosSinRoPE):
    """Rotary embeddings as transformers computes them, including Llama 3's scaling, which `CosSinRoPE` refuses."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """`scaling="llama"` is the `llama3` type of transformers."""

    def _precompute_cache(self) -> torch.Tensor:
        """[max_seq_len, 2 * dim] cosines, then sines."""
        config = self.config
        empty = torch.empty(config.max_seq_len, 2 * config.dim)
        if empty.is_meta:  # the values follow when the model is on its device; arithmetic here would import sympy
            return empty
        angles = torch.outer(torch.arange(config.max_seq_len).float(), self.inverse_frequencies())
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def inverse_frequencies(self) -> Tensor:
        """[dim / 2] angles per position, the fastest first."""
        config = self.config
        inv_freq = 1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)
        if config.scaling != "llama":
            return inv_freq
        scaling = Llama3RopeScaling(
            factor=config.scaling_factor,
            low_freq_factor=config.low_freq_factor,
            high_freq_factor=config.high_freq_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
        )
        return scale_llama3(inv_freq, scaling)


def build_spec(config: DecoderConfig, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    layers = [_layer(config, inner_attention) for _ in range(config.num_layers)]
    if config.family in _WITHOUT_QK_NORM:
        return model_spec(config, head, LlamaPolicy, layers, parallelize_llama)
    return model_spec(config, head, Qwen3Policy, layers, parallelize_qwen3)


def model_spec(
    config: DecoderConfig, head: Head, policy: type[Decoder], layers: list[Any], parallelize: Callable[..., Any]
) -> ModelSpec:
    """The spec of a `policy` of these layers, which `parallelize` distributes."""
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
    block_class = Llama3TransformerBlock if config.family in _WITHOUT_QK_NORM else Qwen3TransformerBlock
    return block_class.Config(
        **norms(config),
        attention=attention_config(config, inner_attention),
        feed_forward=feed_forward(config, config.hidden_dim),
    )


def attention_config(config: DecoderConfig, inner_attention: Module.Config) -> GQAttention.Config:
    """Grouped-query attention, with norms of queries and keys in Qwen3 and biases in Qwen2."""
    attention = make_gqa_config(
        dim=config.dim,
        n_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        wqkv_param_init=NO_INIT,
        wo_param_init=NO_INIT,
        inner_attention=inner_attention,
        fuse_qkv=False,
        rope=_rope(config),
        qk_norm=None if config.family in _WITHOUT_QK_NORM else norm_config(config, config.head_dim),
    )
    assert isinstance(attention.qkv_linear, QKVLinear.Config)
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = config.family == "qwen2"
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
    rope = HFRoPE.Config(dim=config.head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta)
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

    hf_layer_names: ClassVar[Mapping[str, str]] = HF_LAYER_NAMES
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

    @classmethod
    def hf_name(cls, name: str) -> str:
        """The Hugging Face name of a parameter, or of a buffer that checkpoints hold."""
        name = name.replace(_RECOMPUTED, "")
        if (match := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)) is not None:
            return f"model.layers.{match[1]}.{cls.hf_layer_names[match[2]]}{match[3] or ''}"
        return f"{_HF_ROOT_NAMES[name.removesuffix('.weight')]}.weight"


class LlamaPolicy(Policy, Llama3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A Llama that scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """Same fields as `Llama3Model.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Sets how every parameter and activation is sharded."""
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            shard_head_only(self.lm_head)


class Qwen3Policy(Policy, Qwen3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A Qwen3 that scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Same fields as `Qwen3Model.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Sets how every parameter and activation is sharded."""
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            shard_head_only(self.lm_head)
