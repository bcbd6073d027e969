"""Attention over packed rows: on the CPU against its definition in float64; on a GPU masks and the choice of kernel."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from rl.data.packing import Document
from tests.rl.data.row_definition import attended
from trainer.engines.pytorch import block_attention as blocks
from trainer.engines.pytorch import document_attention as module
from trainer.engines.pytorch.block_attention import block_attention, plan_attention
from trainer.engines.pytorch.document_attention import (
    choose_flash_attention,
    document_attention,
    installed_flash_attention,
    plan_row,
    segment_mask,
)
from trainer.engines.titan.model.row_scorer import row_length

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


@pytest.mark.parametrize("name", ["long trees", "a long opening", "longer than blocks are for"])
def test_values_may_be_narrower_than_keys(name: str) -> None:
    documents = ROWS[name]
    parts = plan_row(documents)
    (q, k, v), grad = random_row(sum(document.num_tokens for document in documents), (4, 4), torch.float32)
    inputs, grad = [q, k, v[..., : DIM // 2]], grad[..., : DIM // 2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q[None], k[None], v[None], parts, scale=None)[0]

    exact = [x.double() for x in inputs]
    expected = with_gradients(lambda q, k, v: attend_by_definition(q, k, v, documents), exact, grad.double())
    assert max(errors(with_gradients(attend, inputs, grad), expected)) < 1e-6


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


CPU = torch.device("cpu")


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with torchtitan's compiled functions replaced by what they compile."""
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from torchtitan.models.common import attention as upstream

    from trainer.engines.titan.model import attention

    def attend(*args: Any, kernel_options: Any, **options: Any) -> Any:
        assert min(x.shape[-1] for x in args) >= 16, "a GPU has no kernel for narrower heads"
        return flex_attention(*args, **options)  # pyright: ignore[reportDeprecated]

    monkeypatch.setattr(upstream, "_compiled_create_block_mask", create_block_mask)
    monkeypatch.setattr(upstream.FlexAttention, "_compiled_flex_attn", attend)
    return attention


@pytest.mark.parametrize("name", [name for name in ROWS if name != "longer than blocks are for"])
def test_gpu_logic_shared_prefixes_are_computed_as_by_definition(attention: Any, name: str) -> None:
    documents = ROWS[name]
    (q, k, v), _ = random_row(sum(document.num_tokens for document in documents), (4, 2), torch.float32)
    masks = attention.gpu_masks(torch.zeros(1, len(q), dtype=torch.int64), documents, torch.float32)
    assert isinstance(masks, BlockMask)
    module = attention.SegmentAttention.Config().build()
    out = module(q[None], k[None], v[None], attention_masks=masks, enable_gqa=True)
    torch.testing.assert_close(out[0], attend_by_definition(q, k, v, documents), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dims", "value_dims"), [(8, 8), (16, 8), (12, 16)])
def test_gpu_logic_narrow_heads_are_widened_for_flex(attention: Any, dims: int, value_dims: int) -> None:
    documents = ROWS["an opening"]
    (q, k, v), _ = random_row(sum(document.num_tokens for document in documents), (4, 2), torch.float32)
    q, k, v = q[..., :dims], k[..., :dims], v[..., :value_dims]
    masks = attention.gpu_masks(torch.zeros(1, len(q), dtype=torch.int64), documents, torch.float32)
    out = attention.SegmentAttention.Config().build()(q[None], k[None], v[None], attention_masks=masks, enable_gqa=True)
    torch.testing.assert_close(out[0], attend_by_definition(q, k, v, documents), rtol=1e-4, atol=1e-5)


def test_gpu_logic_only_rows_that_share_leave_the_flash_kernel(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common import attention as upstream

    plain, shared = (Document(5), Document(3)), (Document(5), Document(1, (1, 1)))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    assert isinstance(attention.gpu_masks(positions, shared, torch.bfloat16), BlockMask)
    assert isinstance(attention.gpu_masks(positions, plain, torch.float32), BlockMask)  # flash has no float32
    masks = attention.gpu_masks(positions, plain, torch.bfloat16)
    assert masks.cu_seq_q.tolist() == [0, 5, 8]

    calls: list[tuple[Any, ...]] = []

    def varlen(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return q

    monkeypatch.setattr(upstream, "varlen_attn", varlen)
    q = torch.randn(1, 8, 2, DIM).bfloat16()
    assert torch.equal(attention.SegmentAttention.Config().build()(q, q, q, attention_masks=masks), q)
    assert calls[0][2].tolist() == [0, 5, 8]


def test_gpu_logic_the_block_mask_skips_what_no_token_attends_to() -> None:
    """A prompt of 256 tokens with eight completions of 128 tokens: 27 blocks of a square of 100."""
    mask = segment_mask((Document(256, (128,) * 8),), CPU)
    blocks = create_block_mask(mask, None, None, 1280, 1280, device="cpu")
    dense = create_mask(mask, None, None, 1280, 1280, device="cpu")[0, 0]
    any_pair = dense.view(10, 128, 10, 128).any(3).any(1)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), any_pair)
    assert int(any_pair.sum()) == 3 + 8 * 3


def test_gpu_logic_a_run_sees_few_lengths_of_rows() -> None:
    lengths = {row_length(length, 16) for length in range(1024, 16385)}
    assert len(lengths) <= 4 * 8 + 1
    for length in (1, 15, 128, 129, 1000, 1025, 16383, 16384):
        for multiple in (1, 16, 24, 512):
            padded = row_length(length, multiple)
            assert padded % multiple == 0
            assert max(length, 129) <= padded < max(length, 129) * 9 / 8 + multiple


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["equal lengths", "long shared prefixes", "a long opening"])
def test_gradients_on_a_gpu_are_those_of_the_definition(name: str) -> None:
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from trainer.engines.titan.model import attention

    documents, device = ROWS[name], torch.device("cuda")
    inputs, grad = random_row(sum(document.num_tokens for document in documents), (4, 2), torch.float32)
    expected = q, k, v = [x.double().requires_grad_() for x in inputs]
    attend_by_definition(q, k, v, documents).backward(grad.double())
    found = [x.to(device, torch.bfloat16)[None].requires_grad_() for x in inputs]
    starts = [torch.arange(document.num_tokens) for document in documents]
    masks = attention.gpu_masks(torch.cat(starts)[None].to(device), documents, torch.bfloat16)
    module = attention.SegmentAttention.Config().build()
    out = module(*found, attention_masks=masks, enable_gqa=True)
    out.backward(grad.to(device, torch.bfloat16)[None])
    for mine, exact in zip(found, expected, strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        error = (mine.grad[0].cpu().double() - exact.grad).norm() / exact.grad.norm()
        assert error < 2e-2


FA3, FA4 = "flash_attn_interface", "flash_attn.cute.interface"


@pytest.mark.parametrize(
    ("capability", "installed", "chosen", "missing"),
    [
        ((8, 0), {FA3, FA4}, None, None),
        ((9, 0), set(), None, FA3),
        ((9, 0), {FA3}, "FA3", None),
        ((9, 0), {FA4}, None, FA3),
        ((10, 0), set(), None, FA4),
        ((10, 0), {FA3}, "FA3", FA4),
        ((10, 3), {FA3, FA4}, "FA4", None),
    ],
)
def test_the_fastest_that_is_installed_is_chosen(
    capability: tuple[int, int], installed: set[str], chosen: str | None, missing: str | None
) -> None:
    name, advice = choose_flash_attention(capability, installed.__contains__)
    assert name == chosen
    assert (missing in advice) if missing and advice else advice is None


def test_torchtitan_asks_for_what_is_installed_on_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the patch torchtitan would import `flash_attn_interface` on every Hopper GPU."""
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from torchtitan.models.common.attention import VarlenAttention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    installed_flash_attention.cache_clear()
    try:
        VarlenAttention(VarlenAttention.Config())  # raised ModuleNotFoundError
        assert "attention: FA2, of torch (FA3 would be faster" in capsys.readouterr().out
        (tmp_path / f"{FA3}.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        installed_flash_attention.cache_clear()
        with pytest.raises(RuntimeError, match="does not expose FA3"):  # torch has imported the module
            VarlenAttention(VarlenAttention.Config())
    finally:
        installed_flash_attention.cache_clear()
        sys.modules.pop(FA3, None)


def test_a_module_below_a_missing_package_is_missing() -> None:
    assert not module._has_module("no_such_package.cute.interface")  # pyright: ignore[reportPrivateUsage]
    assert module._has_module("torch.nn.attention")  # pyright: ignore[reportPrivateUsage]
