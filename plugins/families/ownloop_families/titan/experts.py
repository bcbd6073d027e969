"""Mixtures of experts as torchtitan builds them, but computed in any dtype; Qwen3-MoE, whose layers all are ones.

DeepSeek-V3 and GLM-4.5 have layers with sigmoid routing, a selection bias and shared experts. The bias
(https://arxiv.org/abs/2408.15664) is a buffer that no gradient reaches. torchtitan would update it from the load of
experts in a hook of its optimizer, which is not registered here: it stays as the checkpoint has it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_moe_config
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_families.shapes import RoutedShape
from rl.system.decoders import DecoderConfig
from rl.types import Head
from trainer.engines.pytorch.row_runner import of_layer
from trainer.engines.titan.model.specs import (
    DensePolicy,
    attention_config,
    feed_forward,
    model_spec,
    norms,
)

SIGMOID_NAMES = {
    "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
# Any number above 0: it makes torchtitan add the bias, and nothing else reads it.
_HAS_BIAS = 1e-3


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
        return F.linear(x.float(), *(parameter.float() for parameter in self.parameters()))  # a weight, perhaps a bias


class ReplayRouter(TokenChoiceTopKRouter):
    """A router that takes given experts, where there are any, with its own scores of them."""

    replayed: Tensor | None = None
    """[L, k] int64, the experts of each token of the row, or of this rank's shard of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Same fields as `TokenChoiceTopKRouter.Config`."""

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803 - upstream's names
        expert_bias_E: Tensor | None = None,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[1, L, D] -> weights [1, L, k], experts [1, L, k] and scores [1, L, E]."""
        weights, experts, scores = super().forward(x_BLD, expert_bias_E)
        if self.replayed is None:
            return weights, experts, scores
        experts = self.replayed[None]
        if isinstance(scores, DTensor):  # every rank has the experts of all tokens, and scores of some
            mesh = scores.device_mesh
            whole = DTensor.from_local(experts, mesh, [Replicate()] * mesh.ndim, run_check=False)
            experts = whole.redistribute(placements=scores.placements)
        weights = scores.gather(-1, experts)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, experts, scores


class Replays(TransformerBlock):
    """Mixed into a layer, it has the router, if any, replay the experts that come with what attention needs to know."""

    layer: int = 0
    """Counts from 0 in the whole model."""

    def forward(self, x: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]; `attention_masks` may be a `RoutedPlan`."""
        attention_masks, experts = of_layer(attention_masks, self.layer)
        if self.moe_enabled:
            moe: Any = self.moe
            moe.router.replayed = experts
        return super().forward(x, attention_masks, positions)


class RoutedBlock(Replays, Qwen3TransformerBlock):
    """A layer of Qwen3 with experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """`layer` as in `Replays`."""

        layer: int = 0

    def __init__(self, config: Config) -> None:
        """Builds the layer."""
        super().__init__(config)
        self.layer = config.layer


def moe_config(config: DecoderConfig, experts: GroupedExperts.Config | None = None, **router: Any) -> MoE.Config:
    """A layer's router and experts, without load balancing, so that the gradient is that of the loss alone.

    `experts` are Qwen3's by default, and `router` are further options of the router.
    """
    moe = config.moe
    assert moe is not None
    options: dict[str, Any] = {"score_func": "softmax", **router}
    return make_moe_config(
        num_experts=moe.num_experts,
        router=ReplayRouter.Config(
            num_experts=moe.num_experts,
            gate=RouterGate.Config(
                in_features=config.dim,
                out_features=moe.num_experts,
                bias=options.pop("bias", False),
                param_init=dict.fromkeys(("weight", "bias"), skip_param_init),
            ),
            top_k=moe.experts_per_token,
            route_norm=moe.normalize_scores,
            **options,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=experts
            or Experts.Config(
                dim=config.dim,
                hidden_dim=moe.hidden_dim,
                num_experts=moe.num_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=moe.num_experts, top_k=moe.experts_per_token),
        ),
        load_balance_coeff=None,
    )


def sigmoid_network(shape: RoutedShape, layer: int) -> dict[str, Any]:
    """A layer's feed-forward network, or its experts by sigmoid routing, as the field of the layer's configuration."""
    if layer < shape.routing.first_layer:
        return {"feed_forward": feed_forward(shape, shape.hidden_dim)}
    routing, moe = shape.routing, shape.moe
    assert moe is not None
    options: dict[str, Any] = {"score_func": "sigmoid", "route_scale": routing.scale}
    if routing.num_groups > 1:
        options |= {"num_expert_groups": routing.num_groups, "num_limited_groups": routing.num_chosen_groups}
    config = moe_config(shape, **options)
    config.load_balance_coeff = _HAS_BIAS
    if routing.num_shared_experts:
        config.shared_experts = feed_forward(shape, moe.hidden_dim * routing.num_shared_experts)
    return {"moe": config}


def build_spec(shape: DecoderConfig, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a Qwen3-MoE that ends in `head`; `inner_attention` configures its attention kernel."""
    layers = [
        RoutedBlock.Config(
            **norms(shape), attention=attention_config(shape, inner_attention), moe=moe_config(shape), layer=index
        )
        for index in range(shape.num_layers)
    ]
    return model_spec(shape, head, DensePolicy, layers, parallelize_qwen3)
