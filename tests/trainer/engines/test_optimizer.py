"""Steps at the borders of float32, against AdamW in float64."""

import math

import pytest
import torch

from rl.types import AdamParams, MuonParams
from trainer.engines.pytorch.optimizer import Optimizer


def _optimizer(gradient: list[float]) -> tuple[Optimizer, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.eye(2))
    weight.grad = torch.tensor([gradient, gradient])
    return Optimizer({"layers.0.weight": weight}), weight


@pytest.mark.parametrize("kind", [AdamParams, MuonParams])
@pytest.mark.parametrize(
    ("gradient", "scale", "clip"),
    [
        ([1.0, 1.0], 1e39, 0.0),  # the scaled gradient is infinite in float32
        ([1e-42, 1e-42], 1e42, 0.0),  # the scale is
        ([1.0, 1e20], 1.0, 0.0),  # the square of the gradient is
        ([1.0, 1.0], 1e30, 1e25),  # that of the clipped one is
    ],
)
def test_a_gradient_too_large_for_float32_changes_nothing(
    kind: type[AdamParams], gradient: list[float], scale: float, clip: float
) -> None:
    optimizer, weight = _optimizer(gradient)
    norm = optimizer.step(kind(learning_rate=1e-3, grad_clip_norm=clip), scale)
    assert norm == math.inf
    assert torch.equal(weight, torch.eye(2))
    assert not any(state["step"] for state in optimizer.state().values())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 1e39])
def test_a_clipped_gradient_may_have_had_any_size(scale: float) -> None:
    optimizer, weight = _optimizer([0.0, 2.0])
    params = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0, eps=1e-30)
    assert optimizer.step(params, scale) == pytest.approx(scale * math.sqrt(8), rel=1e-6)

    expected = torch.nn.Parameter(torch.eye(2, dtype=torch.float64))
    size = min(scale * math.sqrt(8), 1.0) / math.sqrt(2)  # of each of the two numbers that are not 0
    expected.grad = torch.tensor([[0.0, size], [0.0, size]], dtype=torch.float64)
    torch.optim.AdamW([expected], lr=1e-3, betas=(0.9, 0.95), eps=1e-30, weight_decay=0.0).step()
    if scale != 1e-30:  # whose square is 0 in float32
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-9)
    assert weight.isfinite().all()


def test_the_smallest_eps_keeps_weights_without_a_gradient() -> None:
    optimizer, weight = _optimizer([0.0, 1.0])
    optimizer.step(AdamParams(learning_rate=1e-3, eps=1.2e-38), 1.0)
    assert weight[:, 0].tolist() == [1.0, 0.0]
