"""The gated delta rule over packed rows against the recurrence, token by token, fla's kernels, and a convolution."""

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

from ownloop_families.gated_delta import by_kernel, causal_convolution, describe_kernel, gated_delta_rule

SIZES = ([1, 17, 5, 40, 9, 23, 33, 12], [100, 2, 64, 128, 65], [7], [64] * 3)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one document, as the paper writes it. Queries and keys belong to groups of heads."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
    outputs: list[Tensor] = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t] * q.shape[-1] ** -0.5))
    return torch.stack(outputs)


def by_documents(row: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return torch.cat([token_by_token(*part) for part in zip(*(x.split(list(sizes)) for x in row), strict=True)])


def random_row(sizes: Sequence[int], groups: int) -> list[Tensor]:
    """q, k, v, g and beta of two heads, one of which forgets fast, with 8 dimensions of keys and 12 of values."""
    length, heads = sum(sizes), 2
    shapes = [(length, groups, 8), (length, groups, 8), (length, heads, 12)]
    decays = -torch.rand(length, heads, dtype=torch.float64) * torch.tensor([0.01, 6.0])
    betas = torch.rand(length, heads, dtype=torch.float64)
    return [x.requires_grad_() for x in (*(torch.randn(shape, dtype=torch.float64) for shape in shapes), decays, betas)]


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_the_recurrences(sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    inputs = random_row(sizes, groups=1)
    weight = torch.randn(sum(sizes), 2, 12, dtype=torch.float64)
    q, k, v, g, beta = inputs
    found, expected = gated_delta_rule(q, k, v, g, beta, sizes), by_documents(inputs, sizes)
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


def kernel_like_flas(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """What `chunk_gated_delta_rule` of fla-core 0.6.0 takes, checks and returns, by the recurrence."""
    assert (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel) == (None, None, False, True)
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert [len(x) for x in (q, k, v, g, beta)] == [1] * 5
    assert q.shape == k.shape
    sizes = cu_seqlens.diff().tolist()
    return by_documents([x[0] for x in (q, k, v, g, beta)], sizes)[None], None


@pytest.mark.parametrize("groups", [1, 2])
def test_gpu_logic_flas_kernel_gets_a_row_as_it_takes_it(groups: int) -> None:
    torch.manual_seed(0)
    sizes = [1, 17, 70]
    q, k, v, g, beta = random_row(sizes, groups)
    expected = gated_delta_rule(q, k, v, g, beta, sizes)
    torch.testing.assert_close(by_kernel(kernel_like_flas, (q, k, v, g, beta), sizes), expected, rtol=1e-10, atol=1e-10)


def test_gpu_logic_a_gpu_without_fla_is_told_what_it_lacks() -> None:
    assert "fla-core, which is not installed" in describe_kernel(has_fla=False)
    assert describe_kernel(has_fla=True) == "gated delta rule: kernels of fla in bfloat16, PyTorch in float32"


@pytest.mark.gpu
def test_flas_kernels_agree_with_the_recurrence() -> None:
    pytest.importorskip("fla")
    torch.manual_seed(0)
    sizes = [1, 17, 130]
    halves = [torch.randn(148, heads, 128).bfloat16() for heads in (1, 1, 2)]
    decays, betas = -torch.rand(148, 2), torch.rand(148, 2).bfloat16()
    plain = [x.double().requires_grad_() for x in (*halves, decays, betas)]
    row = [x.cuda().requires_grad_() for x in (*halves, decays, betas)]
    q, k, v, g, beta = row
    results = gated_delta_rule(q, k, v, g, beta, sizes), by_documents(plain, sizes)
    grads = [torch.autograd.grad(out.sum(), x) for out, x in zip(results, (row, plain), strict=True)]
    for one, other in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
        assert float((one.cpu().double() - other).norm()) <= 3e-2 * float(other.norm())
