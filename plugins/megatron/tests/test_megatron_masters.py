"""Float32 parameters as slices of a model's fused ones: what is shared, what is copied, where gradients go."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from ownloop_megatron.mcore.masters import MasterSlices
from ownloop_megatron.mcore.names import Piece
from tests.trainer.engines.test_moments_dtype import check_resumes_from_float32

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
PIECES = [Piece("q", 4, 0, 2), Piece("k", 4, 2, 3), Piece("v", 4, 3, 4)]


def masters_of(dtype: torch.dtype) -> tuple[nn.Parameter, MasterSlices]:
    """A fused parameter [8, 3] and its slices."""
    groups: Any = SimpleNamespace(is_distributed=False)
    source = nn.Parameter(torch.arange(24.0).view(8, 3).to(dtype))
    return source, MasterSlices([(source, PIECES)], groups)


def fused(slices: MasterSlices) -> Tensor:
    return torch.cat([slices.parameters[name].detach() for name in "qkv"])


def test_in_float32_slices_share_the_memory_of_the_model() -> None:
    source, slices = masters_of(torch.float32)
    with torch.no_grad():
        slices.parameters["k"].zero_()
    assert torch.equal(fused(slices), source)
    assert not source[4:6].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_rows_add_up_in_float32(dtype: torch.dtype) -> None:
    source, slices = masters_of(dtype)
    for factor in (1.0, 256.5):  # bfloat16 cannot hold the sum
        (source * factor).sum().backward()
    assert source.grad is None
    expected = 1 + float(torch.tensor(256.5).to(dtype))
    for parameter in slices.parameters.values():
        assert parameter.grad is not None
        assert (parameter.grad == expected).all()


def test_compute_copies_leave_and_come_back_with_parameters() -> None:
    source, slices = masters_of(torch.bfloat16)
    before = dict(slices.parameters)
    slices.to(CPU, compute_device=ELSEWHERE)
    assert source.numel() == 0
    with torch.no_grad():
        slices.parameters["v"].add_(1.0)
    slices.to(CPU, compute_device=CPU)
    assert torch.equal(source, fused(slices).bfloat16())
    assert source.shape == (8, 3)
    assert all(slices.parameters[name] is parameter for name, parameter in before.items()), "the optimizer holds these"


def test_memory_is_still_shared_after_a_move() -> None:
    source, slices = masters_of(torch.float32)
    before = dict(slices.parameters)
    slices.to(CPU, compute_device=CPU)
    with torch.no_grad():
        before["q"].fill_(7.0)
    assert (source[:4] == 7).all()


def test_gpu_logic_a_run_with_narrow_moments_resumes_from_float32_too(tmp_path: Path) -> None:
    check_resumes_from_float32("megatron", tmp_path)
