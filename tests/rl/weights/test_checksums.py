"""Checksums see what is wrong, wherever it is."""

import pytest
import torch

from rl.weights.memory import BufferChecksums, add_up, element_sum

SIZES = (64, 1002, 8192, 10_000_003)


def _buffer() -> tuple[torch.Tensor, list[tuple[int, int]]]:
    extents: list[tuple[int, int]] = []
    end = 4096
    for size in SIZES:
        extents.append((end, size))
        end += -(-size // 64) * 64
    data = torch.zeros(end, dtype=torch.uint8)
    for offset, size in extents:
        data[offset : offset + size] = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    return data, extents


def test_a_wrong_byte_changes_one_tensors_checksum_alone() -> None:
    data, extents = _buffer()
    checksums = BufferChecksums(extents)
    expected = checksums(data)
    assert expected == checksums(data.clone())
    for position in (0, 500, 1001):
        wrong = data.clone()
        wrong[extents[1][0] + position] ^= 1
        found = checksums(wrong)
        assert [a != b for a, b in zip(found, expected, strict=True)] == [False, True, False, False]


def test_checksums_see_every_part() -> None:
    data, extents = _buffer()
    offset, sampled = extents[3][0], BufferChecksums(extents)
    assert sampled(data)[0] == int(data.view(torch.int64)[512:520].sum())
    for part in range(64):  # of as many ranks that hold rows
        wrong = data.clone()
        wrong[offset + part * 156_250 : offset + (part + 1) * 156_250] ^= 1
        assert sampled(wrong) != sampled(data)


@pytest.mark.parametrize("num_columns", [4096, 1024, 576, 11008])
def test_sampled_checksums_see_every_ranks_columns(num_columns: int) -> None:
    weight = torch.zeros(512, num_columns, dtype=torch.bfloat16)
    checksums = BufferChecksums([(0, weight.nbytes)])
    width = num_columns // 8
    for rank in range(8):
        wrong = weight.clone()
        wrong[:, rank * width : (rank + 1) * width] = 1
        assert checksums(wrong.view(-1).view(torch.uint8)) != checksums(weight.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(7, 12, generator=torch.Generator().manual_seed(0))).to(dtype)
    shards = [*tensor[:3].split(5, dim=1), tensor[3:]]
    assert add_up(element_sum(shard) for shard in shards) == element_sum(tensor)
    wrong = tensor.clone()
    wrong[6, 11] += 1
    assert element_sum(wrong) != element_sum(tensor)
