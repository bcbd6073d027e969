"""Layers with sigmoid routing, a selection bias and shared experts, as DeepSeek-V3 and GLM-4.5 have them.

The bias (https://arxiv.org/abs/2408.15664) is a buffer that no gradient reaches. torchtitan would update it from the
load of experts in a hook of its optimizer, which is not registered here: it stays as the checkpoint has it.
"""

from typing import Any

from torchtitan.models.common.moe import MoE

from trainer.engines.titan.model.specs import HF_LAYER_NAMES, feed_forward
from trainer.families.decoders import RoutedShape
from trainer.families.experts import moe_config

ROUTED_NAMES = {
    **HF_LAYER_NAMES,
    "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
# Any number above 0: it makes torchtitan add the bias, and nothing else reads it.
_HAS_BIAS = 1e-3


def network(shape: RoutedShape, layer: int) -> dict[str, Any]:
    """A layer's feed-forward network, or its experts, as the field of the layer's configuration."""
    if layer < shape.routing.first_layer:
        return {"feed_forward": feed_forward(shape, shape.hidden_dim)}
    return {"moe": _experts(shape)}


def _experts(shape: RoutedShape) -> MoE.Config:
    routing, moe = shape.routing, shape.moe
    assert moe is not None
    options: dict[str, Any] = {"score_func": "sigmoid", "route_scale": routing.scale}
    if routing.num_groups > 1:
        options |= {"num_expert_groups": routing.num_groups, "num_limited_groups": routing.num_chosen_groups}
    config = moe_config(shape, **options)
    config.load_balance_coeff = _HAS_BIAS
    if routing.num_shared_experts:
        config.shared_experts = feed_forward(shape, moe.hidden_dim * routing.num_shared_experts)
    return config
