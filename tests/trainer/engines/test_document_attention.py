"""Attention over packed rows on the CPU against its definition, with autograd in float64."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.data.packing import Document
from tests.rl.data.row_definition import attended
from trainer.engines.pytorch import block_attention as blocks
from trainer.engines.pytorch import document_attention as module
from trainer.engines.pytorch.block_attention import block_attention, plan_attention
from trainer.engines.pytorch.document_attention import document_attention, plan_row

DIM = 16
ROWS = {
    "one token": (Document(1),),
    "equal lengths": (Document(64), Document(64), Document(64)),
    "short documents that are padded together": (Document(33), Document(70), Document(40), Document(65), Document(48)),
    "short and long documents in turns": (Document(300), Document(20), Document(257), Document(31)),
    "short shared prefixes": (Document(20, (3, 0, 7)), Document(5), Document(22, (1, 4)), Document(20, (3, 0, 7))),
    "long shared prefixes": (Document(70, (130, 0, 1, 66, 64)), Document(3, (150, 150)), Document(256, (1, 90))),
    "short trees": (Document(20, (3, 4, 2, 5, 7), depths=(1, 2, 2, 1, 2)), Document(21, (3, 4), depths=(1, 2))),
    "long trees": (
        Document(70, (30, 90, 65, 8, 70, 1, 66, 40), depths=(1, 2, 2, 1, 2, 3, 3, 1)),
        Document(3, (100, 100, 100, 1), depths=(1, 2, 1, 2)),
    ),
    "a tree with an opening": (
        Document(40),
        Document(5, (30, 90, 65, 8, 70), 40, (1, 2, 2, 1, 2)),
        Document(9, (2, 3, 1, 4), 40, (1, 2, 3, 1)),
    ),
    "an opening": (Document(9), Document(20, (3, 0, 7), 9), Document(31, opening=9), Document(300, opening=9)),
    "a long opening": (Document(40), Document(3, (70, 190), 40), Document(1, opening=40), Document(20, (3, 3), 40)),
    "longer than blocks are for": (Document(1025), Document(3), Document(1030)),
}


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, documents: tuple[Document, ...]) -> Tensor:
    """[L, heads, D]: the definition, token by token."""
    allowed = torch.from_numpy(attended(documents))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


def random_row(length: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        (2 * torch.randn(length, n, DIM, generator=generator)).to(dtype)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    return [q, k, v], grad


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(grad.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative error of the output and of each gradient."""
    assert len(got) == len(expected) == 4
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]


@pytest.mark.seconds
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_equals_its_definition_in_float64(name: str, heads: tuple[int, int]) -> None:
    documents = ROWS[name]
    parts = plan_row(documents)
    inputs, grad = random_row(sum(document.num_tokens for document in documents), heads, torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q[None], k[None], v[None], parts, scale=None)[0]

    exact = [x.double() for x in inputs]
    expected = with_gradients(lambda q, k, v: attend_by_definition(q, k, v, documents), exact, grad.double())
    assert max(errors(with_gradients(attend, inputs, grad), expected)) < 1e-6
    with torch.no_grad():
        assert (attend(*inputs) - expected[0]).abs().max() < 1e-5


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_lose_only_what_rounding_costs(dtype: torch.dtype) -> None:
    names = ("an opening", "short shared prefixes", "long shared prefixes", "long trees")
    documents = sum((ROWS[name] for name in names), ())
    plan = plan_attention(documents)
    inputs, grad = random_row(sum(document.num_tokens for document in documents), (6, 2), torch.bfloat16)
    exact = [x.double() for x in inputs]
    expected = with_gradients(lambda q, k, v: attend_by_definition(q, k, v, documents), exact, grad.double())
    got = with_gradients(lambda q, k, v: block_attention(q, k, v, plan, scale=None, dtype=dtype), inputs, grad)
    assert [x.dtype for x in got] == [torch.bfloat16] * 4
    assert max(errors(got, expected)) < 2 * 2**-8


def test_the_scale_is_that_of_the_caller() -> None:
    inputs, grad = random_row(40, (2, 1), torch.float32)
    plan = plan_attention([Document(40)])
    got = with_gradients(lambda q, k, v: block_attention(q, k, v, plan, scale=0.5, dtype=torch.float32), inputs, grad)
    exact = [inputs[0].double() * 0.5 * DIM**0.5, *(x.double() for x in inputs[1:])]
    expected = with_gradients(lambda q, k, v: attend_by_definition(q, k, v, (Document(40),)), exact, grad.double())
    expected[1] *= 0.5 * DIM**0.5
    assert max(errors(got, expected)) < 1e-6


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_elements = max(self.num_elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_memory_is_linear_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "no_dispatch", contextlib.nullcontext)  # else the mode would see nothing
    documents = (*(Document(250) for _ in range(20)), Document(1000), Document(500, (250,) * 10))
    plan = plan_attention(documents)
    inputs, grad = random_row(sum(document.num_tokens for document in documents), (6, 2), torch.float32)
    with LargestTensor() as largest:
        with_gradients(lambda q, k, v: block_attention(q, k, v, plan, scale=None, dtype=torch.float32), inputs, grad)
    assert largest.num_elements <= max(inputs[0].numel() * 1.1, 2 * 2**18)


def test_every_document_has_its_way() -> None:
    assert [part.plan is None for part in plan_row(ROWS["longer than blocks are for"])] == [True, False, True]
    assert [part.plan is None for part in plan_row((Document(1000, (500,)),))] == [False], "blocks alone share prefixes"


def test_bfloat16_is_multiplied_in_the_faster_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(module, "has_fast_bfloat16", lambda fast=fast: fast)
        assert module.product_dtype.__wrapped__(torch.bfloat16) == dtype
        assert module.product_dtype.__wrapped__(torch.float32) == torch.float32
