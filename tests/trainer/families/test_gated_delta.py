"""The gated delta rule over packed rows against the recurrence, token by token, and transformers' convolution.

Covers: trainer/families/gated_delta.py, trainer/families/qwen3_5.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trainer.families.gated_delta import causal_convolution, gated_delta_rule

SIZES = ([1, 17, 5, 40, 9, 23, 33, 12], [100, 2, 64, 128, 65], [7], [64] * 3)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one document, as the paper writes it."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
    outputs: list[Tensor] = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t] * q.shape[-1] ** -0.5))
    return torch.stack(outputs)


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_the_recurrences(sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    length, heads = sum(sizes), 2
    shapes = [(length, heads, 8), (length, heads, 8), (length, heads, 12)]
    decays = -torch.rand(length, heads, dtype=torch.float64) * torch.tensor([0.01, 6.0])
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v, decays, torch.rand(length, heads, dtype=torch.float64))]
    weight = torch.randn(length, heads, 12, dtype=torch.float64)
    found = gated_delta_rule(q, k, v, inputs[3], inputs[4], sizes)
    expected = torch.cat([token_by_token(*part) for part in zip(*(x.split(list(sizes)) for x in inputs), strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected)), strict=True)
    for one, other in pairs:
        assert float((one - other).norm()) <= 1e-10 * float(other.norm())


def save_products(_: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    del args, options
    is_product = operation is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("contexts", [noop_context_fn, partial(create_selective_checkpoint_contexts, save_products)])
def test_gradients_do_not_change_where_layers_are_recomputed(contexts: Any) -> None:
    torch.manual_seed(0)
    row = [torch.randn(70, 2, 8, requires_grad=True) for _ in range(3)]
    row += [-torch.rand(70, 2).requires_grad_(), torch.rand(70, 2, requires_grad=True)]

    def rule(*inputs: Tensor) -> Tensor:
        return gated_delta_rule(*inputs, sizes=[69, 1])

    at_once, again = rule(*row), checkpoint(rule, *row, use_reentrant=False, context_fn=contexts)
    for one, other in zip(*(torch.autograd.grad(out.sum(), row) for out in (at_once, again)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [[1, 3, 9], [1], [1, 1]])
def test_a_convolution_sees_no_earlier_document(sizes: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(sizes), 6), torch.randn(6, 4)
    positions = torch.cat([torch.arange(size) for size in sizes])
    alone = [
        silu(conv1d(part.T[None], weight[:, None], padding=3, groups=6)[0, :, : len(part)]).T for part in x.split(sizes)
    ]
    torch.testing.assert_close(causal_convolution(x, weight, positions), torch.cat(alone))
