"""Qwen3.5 (text) for torchtitan's layouts: linear layers with a gated delta rule, and attention with gated outputs.

torchtitan's own modules need the package `fla`, whose kernels run on GPUs alone, and split queries, keys and values of
a linear layer into parameters that checkpoints do not have. These have the checkpoint's parameters and any device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import spmd_types as spmd
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common import Conv1d, Linear, RMSNorm
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from ownloop_families.gated_delta import delta_layer, installed_kernel
from ownloop_families.qwen3_5 import Qwen35Shape
from ownloop_families.titan.experts import RoutedBlock, moe_config
from ownloop_families.titan.rotary import PartialRoPE
from rl.data.packing import Document
from rl.types import Head
from trainer.engines.titan.model.attention import attention_masks
from trainer.engines.titan.model.specs import (
    HF_LAYER_NAMES,
    NO_INIT,
    Policy,
    feed_forward,
    model_spec,
    shard_head_only,
)


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """What the layers need to know about a row."""

    sizes: tuple[int, ...]
    """Numbers of tokens of its documents, for linear layers."""
    attention: Any
    """What the attention kernel takes."""


class CentredNorm(RMSNorm):
    """RMSNorm times 1 + weight, computed in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Same fields as `RMSNorm.Config`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class GatedNorm(RMSNorm):
    """RMSNorm times SiLU of a gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Same fields as `RMSNorm.Config`."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., D] each -> [..., D]"""
        weight = local(self.weight, Partial())  # of which each rank sees its heads
        normalised = F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)
        return (weight * normalised * F.silu(gate.float())).to(x.dtype)


class DeltaNet(BaseAttention):
    """A linear layer, with the parameters of transformers' `Qwen3_5GatedDeltaNet`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        """`n_heads` is the number of heads of values."""

        num_key_heads: int
        key_head_dim: int
        value_head_dim: int
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_b: Linear.Config
        in_proj_a: Linear.Config
        conv1d: Conv1d.Config
        norm: GatedNorm.Config
        out_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        """Allocates the parameters."""
        super().__init__()
        self.num_k_heads, self.num_v_heads = config.num_key_heads, config.n_heads
        self.head_k_dim, self.head_v_dim = config.key_head_dim, config.value_head_dim
        self.key_dim, self.value_dim = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.in_proj_qkv, self.in_proj_z = config.in_proj_qkv.build(), config.in_proj_z.build()
        self.in_proj_b, self.in_proj_a = config.in_proj_b.build(), config.in_proj_a.build()
        self.conv1d, self.norm, self.out_proj = config.conv1d.build(), config.norm.build(), config.out_proj.build()
        self.A_log = nn.Parameter(torch.empty(config.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.n_heads))

    def forward(self, x: Tensor, attention_masks: HybridPlan, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]"""
        del positions
        layer = _HeadsOfRank(self, x.device_mesh) if isinstance(x, DTensor) else self
        return delta_layer(layer, x, attention_masks.sizes)


class _HeadsOfRank:
    """A linear layer with the heads of one tensor-parallel rank, whose tensors are plain.

    The checkpoint has queries, keys and values of all heads in one projection, whose rows are not in the order of
    heads. So each rank projects as many rows as the others, gathers all, and takes what its heads need.
    """

    def __init__(self, layer: DeltaNet, mesh: DeviceMesh) -> None:
        """`mesh` has the ranks."""
        self._layer, self._mesh = layer, mesh
        self.head_k_dim, self.head_v_dim, self.norm = layer.head_k_dim, layer.head_v_dim, layer.norm
        self.key_dim, self.value_dim = layer.key_dim // mesh.size(), layer.value_dim // mesh.size()
        self.A_log, self.dt_bias = (local(x, Shard(0)) for x in (layer.A_log, layer.dt_bias))
        self.conv1d = SimpleNamespace(weight=self._own(local(layer.conv1d.weight, Partial()), 0))

    def in_proj_qkv(self, x: DTensor) -> Tensor:
        """[1, L, D] -> [1, L, channels of these heads]"""
        rows = self._layer.in_proj_qkv(x).redistribute(placements=[Replicate()])
        return self._own(local(rows, Partial()), -1)

    def in_proj_z(self, x: DTensor) -> Tensor:
        """[1, L, D] -> [1, L, dimensions of the gates of these heads]"""
        return local(self._layer.in_proj_z(x), Shard(2))

    def in_proj_b(self, x: DTensor) -> Tensor:
        """[1, L, D] -> [1, L, these heads]"""
        return local(self._layer.in_proj_b(x), Shard(2))

    def in_proj_a(self, x: DTensor) -> Tensor:
        """[1, L, D] -> [1, L, these heads]"""
        return local(self._layer.in_proj_a(x), Shard(2))

    def out_proj(self, x: Tensor) -> Tensor:
        """[1, L, dimensions of the values of these heads] -> [1, L, D]"""
        return self._layer.out_proj(DTensor.from_local(x, self._mesh, [Shard(2)], run_check=False))

    def _own(self, channels: Tensor, dim: int) -> Tensor:
        layer, (rank, size) = self._layer, (self._mesh.get_local_rank(), self._mesh.size())
        parts = channels.split([layer.key_dim, layer.key_dim, layer.value_dim], dim)
        return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def local(tensor: Tensor, gradient: Placement) -> Tensor:
    """A tensor-parallel rank's part of a tensor, whose gradient there is placed so; a plain tensor as it is."""
    return tensor.to_local(grad_placements=[gradient]) if isinstance(tensor, DTensor) else tensor


class GatedAttention(BaseAttention):
    """Grouped-query attention whose outputs are gated; `wq` makes queries and gates."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        """`head_dim` is that of queries, keys, values and gates."""

        head_dim: int
        wq: Linear.Config
        wk: Linear.Config
        wv: Linear.Config
        wo: Linear.Config
        q_norm: CentredNorm.Config
        k_norm: CentredNorm.Config
        rope: PartialRoPE.Config

    def __init__(self, config: Config) -> None:
        """Allocates the parameters."""
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv, self.wo = (x.build() for x in (config.wq, config.wk, config.wv, config.wo))
        self.q_norm, self.k_norm, self.rope = config.q_norm.build(), config.k_norm.build(), config.rope.build()
        self.inner_attention = config.inner_attention.build()

    def forward(self, x: Tensor, attention_masks: HybridPlan, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]"""
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wk, self.wv))
        q, k = self.rope(self.q_norm(q), self.k_norm(k), positions)
        out = self.inner_attention(
            *(q, k, v), attention_masks=attention_masks.attention, scale=self.head_dim**-0.5, enable_gqa=True
        )
        return self.wo((out * gate.sigmoid()).flatten(-2))


class Qwen35Policy(Policy):
    """A Qwen3.5 model that scores tokens."""

    hf_layer_names: Mapping[str, str] = {
        **HF_LAYER_NAMES,
        **{
            f"attention.{name}": f"linear_attn.{name}"
            for name in (
                *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
                *("conv1d", "norm", "out_proj", "A_log", "dt_bias"),
            )
        },
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "moe.shared_experts.w1": "mlp.shared_expert.gate_proj",
        "moe.shared_experts.w2": "mlp.shared_expert.down_proj",
        "moe.shared_experts.w3": "mlp.shared_expert.up_proj",
        "moe.shared_experts.gate": "mlp.shared_expert_gate",
    }
    shares_prefixes: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        """Same fields as `Decoder.Config`."""

        def update_from_config(self, *, config: Any, **kwargs: object) -> None:
            """Sets how experts are shared by ranks."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            parallel = config.parallelism
            ways = {"enable_sp": parallel.enable_sequence_parallel, "enable_ep": parallel.expert_parallel_degree > 1}
            set_decoder_sharding_config(self, enable_sp=ways["enable_sp"])
            layout: dict[str, Any] = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
            for layer in self.layers:
                _shard(layer, enable_sp=ways["enable_sp"])
                if layer.moe is not None:
                    set_moe_sharding_config(layer.moe, **ways, expert_param_layout=layout)
                    _shard_gate(layer.moe.shared_experts.gate, enable_sp=ways["enable_sp"])
            shard_head_only(self.lm_head)

    def plan(self, positions: Tensor, documents: Sequence[Document], compute_dtype: torch.dtype) -> HybridPlan:
        """What the layers need to know about a row with positions [1, L]."""
        attention = attention_masks(positions, documents, compute_dtype)
        return HybridPlan(tuple(document.num_tokens for document in documents), attention)


def _shard(layer: Any, *, enable_sp: bool) -> None:
    """Says how tensor parallelism cuts a layer: by heads, and the feed-forward network by hidden dimensions."""
    outside = dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    whole, norm = {"weight": dense_param_placement(tp=spmd.R)}, norm_config(enable_sp=enable_sp)
    layer.attention_norm.sharding_config = layer.ffn_norm.sharding_config = norm
    if layer.feed_forward is not None:
        set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=outside, enable_sp=enable_sp)
    attention = layer.attention
    states: dict[str, Any] = {}
    if isinstance(attention, DeltaNet.Config):
        columns, rows = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"
        states = dict.fromkeys(("A_log", "dt_bias"), dense_param_placement(tp=spmd.S(0)))
        attention.conv1d.sharding_config = attention.norm.sharding_config = ShardingConfig(state_shardings=whole)
    else:
        columns, rows = ("wq", "wk", "wv"), "wo"
        attention.q_norm.sharding_config = attention.k_norm.sharding_config = ShardingConfig(state_shardings=whole)
        attention.rope.sharding_config = ShardingConfig(state_shardings={"cache": dense_param_placement(tp=spmd.R)})
        set_gqa_inner_attention_local_map(attention.inner_attention)
    for name in columns:
        getattr(attention, name).sharding_config = colwise_config()
    getattr(attention, rows).sharding_config = rowwise_config(output_sp=enable_sp)
    attention.sharding_config = ShardingConfig(
        state_shardings=states,
        in_src_shardings={"x": outside},
        in_dst_shardings={"x": dense_activation_placement(tp=spmd.R)},
    )


def _shard_gate(gate: Linear.Config, *, enable_sp: bool) -> None:
    """The gate of shared experts sees whole rows, and its outputs are cut as the experts' are."""
    gate.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=dense_activation_placement(tp=spmd.R),
        out_dst_shardings=dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I),
    )


def build_spec(shape: Qwen35Shape, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    installed_kernel()  # says at the start what computes
    layers = [_layer(shape, inner_attention, index) for index in range(shape.num_layers)]
    spec = model_spec(shape, head, Qwen35Policy, layers, parallelize_qwen3)
    assert isinstance(spec.model, Decoder.Config)
    spec.model.norm = _norm(shape, shape.dim)
    return spec


def _layer(shape: Qwen35Shape, inner_attention: Module.Config, index: int) -> RoutedBlock.Config:
    attention = _attention(shape, inner_attention) if shape.attends[index] else _delta_net(shape, inner_attention)
    network: dict[str, Any] = (
        {"feed_forward": feed_forward(shape, shape.hidden_dim)} if shape.moe is None else {"moe": _experts(shape)}
    )
    norms = {name: _norm(shape, shape.dim) for name in ("attention_norm", "ffn_norm")}
    return RoutedBlock.Config(**norms, attention=attention, **network, layer=index)


def _attention(shape: Qwen35Shape, inner_attention: Module.Config) -> GatedAttention.Config:
    width, narrow = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return GatedAttention.Config(
        n_heads=shape.num_heads,
        head_dim=shape.head_dim,
        inner_attention=inner_attention,
        wq=_linear(shape.dim, 2 * width),
        wk=_linear(shape.dim, narrow),
        wv=_linear(shape.dim, narrow),
        wo=_linear(width, shape.dim),
        q_norm=_norm(shape, shape.head_dim),
        k_norm=_norm(shape, shape.head_dim),
        rope=PartialRoPE.Config(dim=shape.rotary_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta),
    )


def _delta_net(shape: Qwen35Shape, inner_attention: Module.Config) -> DeltaNet.Config:
    values, channels = shape.values, shape.channels
    return DeltaNet.Config(
        n_heads=shape.num_value_heads,
        num_key_heads=shape.num_key_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        inner_attention=inner_attention,  # which torchtitan's checks read of the first layer
        in_proj_qkv=_linear(shape.dim, channels),
        in_proj_z=_linear(shape.dim, values),
        in_proj_b=_linear(shape.dim, shape.num_value_heads),
        in_proj_a=_linear(shape.dim, shape.num_value_heads),
        conv1d=Conv1d.Config(
            in_channels=channels,
            out_channels=channels,
            kernel_size=shape.kernel_size,
            groups=channels,
            bias=False,
            param_init=NO_INIT,
        ),
        norm=GatedNorm.Config(normalized_shape=shape.value_head_dim, eps=shape.norm_eps, param_init=NO_INIT),
        out_proj=_linear(values, shape.dim),
        param_init=dict.fromkeys(("A_log", "dt_bias"), skip_param_init),
    )


def _experts(shape: Qwen35Shape) -> MoE.Config:
    config = moe_config(shape)
    shared = feed_forward(shape, shape.shared_hidden_dim)
    config.shared_experts = SigmoidGatedFeedForward.Config(
        w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=_linear(shape.dim, 1)
    )
    return config


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=NO_INIT)


def _norm(shape: Qwen35Shape, size: int) -> CentredNorm.Config:
    return CentredNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init=NO_INIT)
