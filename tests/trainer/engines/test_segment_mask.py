"""Attention over a packed row on a GPU: masks and forward pass on the CPU, where FlexAttention has no backward pass."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from rl.data.packing import Document
from tests.trainer.engines.test_document_attention import DIM, ROWS, attend_by_definition, random_row
from trainer.engines.pytorch.document_attention import segment_mask
from trainer.engines.titan.model.row_scorer import row_length

CPU = torch.device("cpu")


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with torchtitan's compiled functions replaced by what they compile."""
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from torchtitan.models.common import attention as upstream

    from trainer.engines.titan.model import attention

    def attend(*args: Any, kernel_options: Any, **options: Any) -> Any:
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


def test_gpu_logic_only_rows_that_share_tokens_leave_the_flash_kernel(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for length in (1, 15, 1000, 1025, 16383, 16384):
        for multiple in (1, 16, 24, 512):
            padded = row_length(length, multiple)
            assert padded % multiple == 0
            assert length <= padded < length * 9 / 8 + multiple


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
