"""gpt-oss as torchtitan builds it: sinks and windows in attention, biases in projections, routers and experts.

torchtitan's own layers, with three parts replaced: attention, whose kernels have no gradient for sinks; experts, which
torchtitan computes in bfloat16 alone; and the output projection of attention, whose bias it would scale by the number
of tensor-parallel ranks in its gradient. Parameters have the checkpoint's shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear, QKVLinear
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import rowwise_config
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.gpt_oss import parallelize_gptoss
from torchtitan.models.gpt_oss.model import Attention, GptOssTransformerBlock
from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_families.gpt_oss import GptOssShape
from ownloop_families.titan.experts import Replays, moe_config
from ownloop_families.titan.rotary import YarnRoPE, rope_options
from rl.data.packing import Document
from rl.types import Head
from trainer.engines.pytorch.document_attention import Bounds, attend_with_sinks
from trainer.engines.titan.model.specs import (
    HF_LAYER_NAMES,
    NO_INIT,
    Policy,
    model_spec,
    norms,
    shard_head_only,
)

_EXPERTS = ("gate_up_EDG", "gate_up_bias_EG", "down_EFD", "down_bias_ED")


class SinkKernel(FlexAttention):
    """Attention within documents and windows, with sinks. torchtitan's checks take it for a `FlexAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """`window` is the number of tokens that a query attends to, itself among them; None for all before it."""

        window: int | None = None

    def __init__(self, config: Config) -> None:
        """Builds it."""
        super().__init__(config)
        self._window = (-1 if config.window is None else config.window - 1, 0)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - another kind of mask, and sinks
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan passes and shards these by name
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Bounds,
        scale: float,
        sinks: Tensor,
    ) -> Tensor:
        """[1, L, heads, head_dim] each, and sinks [heads] -> [1, L, heads, head_dim]."""
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        return attend_with_sinks(q, k, v, sinks, attention_masks, scale=scale, window_size=self._window)[None]


class SinkAttention(Attention):
    """torchtitan's attention of gpt-oss, with sinks that the kernel knows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """Same fields as `Attention.Config`."""

    def __init__(self, config: Config) -> None:
        """Builds it, at a scale without YaRN's factor, which `YarnRoPE` has."""
        super().__init__(config)
        self.softmax_scale = config.head_dim**-0.5

    def forward(self, x: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]"""
        q, k, v = self.qkv_linear(x)
        q, k = self.rope(q, k, positions)
        sinks = self.sinks
        if isinstance(sinks, DTensor):  # of this rank's heads
            sinks = sinks.to_local(grad_placements=sinks.placements)
        out = self.inner_attention(q, k, v, attention_masks=attention_masks, scale=self.softmax_scale, sinks=sinks)
        return self.wo(out.reshape(*x.shape[:2], -1))


class BiasedExperts(GroupedExperts):
    """The experts of one layer, in the shapes of the checkpoint: gates and values of the first product alternate.

    Legend: R routed tokens, sorted by expert; E experts held here; D model and F hidden dimension; G = 2 F.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """`alpha` is in the sigmoid of the gate, `limit` bounds gates and values."""

        alpha: float
        limit: float

    def __init__(self, config: Config) -> None:
        """Allocates the four stacks."""
        Module.__init__(self)
        self.num_experts = config.num_experts
        self._alpha, self._limit = config.alpha, config.limit
        sizes = config.num_experts, config.dim, config.hidden_dim
        e, d, f = sizes
        for name, shape in zip(_EXPERTS, ((e, d, 2 * f), (e, 2 * f), (e, f, d), (e, d)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803 - upstream's names
        """[R, D] tokens and [E] counts -> [R, D]."""
        whole = (self.get_parameter(name) for name in _EXPERTS)
        first, first_bias, second, second_bias = (
            (each.to_local() if isinstance(each, DTensor) else each).to(x_RD.dtype) for each in whole
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        # A product in place of an index, whose gradient a GPU would sum in no certain order.
        expert = torch.searchsorted(ends, torch.arange(len(x_RD), device=ends.device, dtype=torch.int32), right=True)
        chosen = (expert[:, None] == torch.arange(len(ends), device=ends.device)).to(x_RD.dtype)  # [R, E]
        both = self._grouped_mm(A=x_RD, B_t=first, offs=ends) + chosen @ first_bias
        gates = both[:, ::2].clamp(max=self._limit)
        values = both[:, 1::2].clamp(-self._limit, self._limit)
        hidden = gates * torch.sigmoid(self._alpha * gates) * (values + 1)
        return self._grouped_mm(A=hidden, B_t=second, offs=ends) + chosen @ second_bias


class GptOssBlock(Replays, GptOssTransformerBlock):
    """A layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssTransformerBlock.Config):
        """`layer` as in `Replays`."""

        layer: int = 0

    def __init__(self, config: Config) -> None:
        """Builds the layer."""
        super().__init__(config)
        self.layer = config.layer


class GptOssPolicy(Policy):
    """A gpt-oss that scores."""

    hf_layer_names: Mapping[str, str] = {
        **HF_LAYER_NAMES,
        "attention.sinks": "self_attn.sinks",
        "moe.router.gate": "mlp.router",
        "moe.routed_experts.inner_experts.gate_up_EDG": "mlp.experts.gate_up_proj",
        "moe.routed_experts.inner_experts.gate_up_bias_EG": "mlp.experts.gate_up_proj_bias",
        "moe.routed_experts.inner_experts.down_EFD": "mlp.experts.down_proj",
        "moe.routed_experts.inner_experts.down_bias_ED": "mlp.experts.down_proj_bias",
    }
    shares_prefixes: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """Same fields as `Decoder.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: object) -> None:
            """Sets how every parameter and activation is sharded."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            parallel = config.parallelism
            ways = {"enable_sp": parallel.enable_sequence_parallel, "enable_ep": parallel.expert_parallel_degree > 1}
            set_gpt_oss_sharding_config(self, **ways)  # pyright: ignore[reportArgumentType] - of any decoder's layers
            layout: dict[str, Any] = dict(zip(_EXPERTS, (spmd.S(2), spmd.S(1), spmd.S(1), spmd.R), strict=True))
            for layer in self.layers:
                layer.attention.wo.sharding_config = rowwise_config(output_sp=ways["enable_sp"])
                set_moe_sharding_config(layer.moe, **ways, expert_param_layout=layout)
            shard_head_only(self.lm_head)

    def plan(self, positions: Tensor, documents: Sequence[Document], compute_dtype: torch.dtype) -> Bounds:
        """Where the documents of a row begin and end."""
        del compute_dtype
        return Bounds([document.num_tokens for document in documents], positions.device)


def build_spec(shape: GptOssShape, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`. Its attention is of its own kind."""
    del inner_attention
    layers = [_layer(shape, index) for index in range(shape.num_layers)]
    return model_spec(shape, head, GptOssPolicy, layers, parallelize_gptoss)


def _layer(shape: GptOssShape, index: int) -> GptOssBlock.Config:
    assert shape.moe is not None
    experts = BiasedExperts.Config(
        dim=shape.dim,
        hidden_dim=shape.moe.hidden_dim,
        num_experts=shape.moe.num_experts,
        alpha=shape.swiglu_alpha,
        limit=shape.swiglu_limit,
        param_init=dict.fromkeys(_EXPERTS, skip_param_init),
    )
    return GptOssBlock.Config(
        **norms(shape),
        attention=_attention(shape, shape.windows[index]),
        moe=moe_config(shape, experts, bias=True),
        layer=index,
    )


def _attention(shape: GptOssShape, window: int | None) -> SinkAttention.Config:
    heads_dim = shape.num_heads * shape.head_dim
    return SinkAttention.Config(
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dim=shape.dim,
        qkv_linear=QKVLinear.Config(
            head_dim=shape.head_dim,
            wq=_projection(shape.dim, heads_dim),
            wkv=_projection(shape.dim, shape.num_kv_heads * shape.head_dim),
        ),
        wo=_projection(heads_dim, shape.dim),
        inner_attention=SinkKernel.Config(window=window),
        sliding_window_size=window,
        rope=YarnRoPE.Config(**rope_options(shape, shape.head_dim, shape.yarn)),
        param_init={"sinks": skip_param_init},
    )


def _projection(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, bias=True, param_init=NO_INIT)
