"""Qwen3's mixture-of-experts layers: torchtitan's, but in any dtype, and with a name for each expert's weights.

torchtitan stacks the weights of a layer's experts into one parameter per projection, while Hugging Face checkpoints
name the weights of each expert. Here an expert is a view of the stack, so nothing is copied on load, push or export.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_moe_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from trainer.engines.decoder_config import DecoderConfig

_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\w+)\.weight")


class Experts(GroupedExperts):
    """The experts of one layer, computed in the dtype of their input. torchtitan's own always use bfloat16.

    Legend, as in torchtitan: R routed tokens, sorted by expert; E experts held here; D model and F hidden dimension.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Same fields as `GroupedExperts.Config`."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803 - upstream's names
        """[R, D] tokens and [E] counts -> [R, D]."""
        w1, w2, w3 = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).to(x_RD.dtype).transpose(-2, -1)
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        hidden = F.silu(self._grouped_mm(A=x_RD, B_t=w1, offs=ends)) * self._grouped_mm(A=x_RD, B_t=w3, offs=ends)
        return self._grouped_mm(A=hidden, B_t=w2, offs=ends)


class RouterGate(Linear):
    """The scores of the experts, computed in float32 on every device.

    torchtitan asks autocast for that, which only CUDA grants: a CPU would choose other experts in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B, L, D] in any dtype -> [B, L, E] float32."""
        return F.linear(x.float(), self.weight.float())


def moe_config(config: DecoderConfig) -> MoE.Config:
    """A layer's router and experts, without load balancing, so that the gradient is that of the loss alone."""
    moe = config.moe
    assert moe is not None
    router = make_router_config(
        dim=config.dim,
        num_experts=moe.num_experts,
        gate_param_init={"weight": skip_param_init},
        top_k=moe.experts_per_token,
        score_func="softmax",
        route_norm=moe.normalize_scores,
    )
    router.gate = RouterGate.Config(
        in_features=config.dim, out_features=moe.num_experts, param_init={"weight": skip_param_init}
    )
    return make_moe_config(
        num_experts=moe.num_experts,
        router=router,
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=config.dim,
                hidden_dim=moe.hidden_dim,
                num_experts=moe.num_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=moe.num_experts, top_k=moe.experts_per_token),
        ),
        load_balance_coeff=None,
    )


def split_experts(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a parameter under its Hugging Face name, or of a stack the experts of which this rank holds a part.

    `parameter` is a stack if its name is `model.layers.{layer}.mlp.experts.{projection}.weight`. Experts are views of
    the stack, and their gradients, if any, are views of its gradient. An expert of which no other rank holds a part is
    a plain tensor.
    """
    if (match := _STACK.fullmatch(name)) is None:
        yield name, parameter
        return
    grads = dict(_experts(parameter.grad)) if parameter.grad is not None else {}
    for index, expert in _experts(parameter.detach()):
        expert.grad = grads.get(index)
        yield f"{match[1]}.{index}.{match[2]}.weight", expert


def split_moments(name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yields the state of an optimizer for a parameter, as `split_experts` yields the parameter.

    All experts of a stack share one step count.
    """
    parts = {key: dict(split_experts(name, state[key])) for key in ("exp_avg", "exp_avg_sq")}
    for part in parts["exp_avg"]:
        yield part, {"step": state["step"], **{key: of_key[part] for key, of_key in parts.items()}}


def _experts(stack: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields index and weight of each expert of which this rank holds a part. The stack may be plain or sharded."""
    if not isinstance(stack, DTensor):
        yield from enumerate(stack.unbind(0))
        return
    mesh, placements = stack.device_mesh, stack.placements
    names = mesh.mesh_dim_names
    assert names is not None
    _, (first, *_) = compute_local_shape_and_global_offset(stack.shape, mesh, placements)
    # Mesh axes over which whole experts are distributed do not shard a single expert.
    within = [(axis, _within_expert(p)) for axis, p in zip(names, placements, strict=True) if not _cuts(p, 0)]
    for index, local in enumerate(stack.to_local().unbind(0), start=first):
        if not within:
            yield index, local
            continue
        submesh = mesh[tuple(axis for axis, _ in within)]
        shape = stack.shape[1:]
        yield (
            index,
            DTensor.from_local(
                local, submesh, [p for _, p in within], run_check=False, shape=shape, stride=(shape[1], 1)
            ),
        )


def _cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement shards that dimension."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _within_expert(placement: Placement) -> Placement:
    """The placement of one expert [., .] for a placement of the stack [E, ., .]."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim - 1)
    assert isinstance(placement, Replicate)
    return placement
