"""Our CPU kernel for adapters, and whether vLLM's own has become right."""

from typing import Any

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from generator.cpu.grouped_lora import GroupedLoRA

pytestmark = pytest.mark.vllm

NUM_SLOTS, RANK, NUM_IN, OUTPUTS = 3, 8, 64, (96, 32)


def _weights(num_out: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(NUM_SLOTS, 1, RANK, NUM_IN, generator=generator)
    return a, torch.randn(NUM_SLOTS, 1, num_out, RANK, generator=generator)


def _wrapper(kind: type[PunicaWrapperCPU], slots: list[int], num_tokens: int) -> Any:
    """A wrapper for a step in which request i uses slot `slots[i]` (-1 for none) for `num_tokens` tokens."""
    wrapper = kind(max_num_batched_tokens=4096, max_batches=64, device="cpu")
    ids = [slot + 1 for slot in slots]  # 0 stands for no adapter
    tokens = tuple(number for number in ids for _ in range(num_tokens))
    mapping = LoRAMapping(tokens, tuple(ids), is_prefill=num_tokens > 1)
    wrapper.update_metadata(mapping, [1, 2, 3], NUM_SLOTS + 1, 128)
    return wrapper


def _is_right(kind: type[PunicaWrapperCPU], slots: list[int], num_tokens: int) -> bool:
    """Whether the outputs of fused projections and the logits are those of one multiplication after the other."""
    wrapper = _wrapper(kind, slots, num_tokens)
    x = torch.randn(len(slots) * num_tokens, NUM_IN)
    stacks = [_weights(size, seed) for seed, size in enumerate(OUTPUTS)]
    y = torch.randn(len(x), sum(OUTPUTS))
    expected = y.clone()
    for row in range(len(x)):
        slot = slots[row // num_tokens]
        if slot >= 0:
            expected[row] += torch.cat([b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in stacks])
    a_stacked, b_stacked = zip(*stacks, strict=True)
    wrapper.add_lora_linear(y, x, a_stacked, b_stacked, 1.0, OUTPUTS)
    a, b = _weights(128, 7)
    logits, states = torch.randn(len(slots), 128), torch.randn(len(slots), NUM_IN)
    expected_logits = logits.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected_logits[row] += b[slot, 0] @ (a[slot, 0] @ states[row])
    wrapper.add_lora_logits(logits, states, a, b, 1.0)
    return torch.allclose(y, expected, atol=1e-4) and torch.allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 100])
@pytest.mark.parametrize("slots", [[-1, -1], [0], [2, 2, 2], [0, -1, 1, 2, 0, -1], [-1, 1, 1, -1]])
def test_every_token_gets_its_own_adapter_or_none(slots: list[int], num_tokens: int) -> None:
    assert _is_right(GroupedLoRA, slots, num_tokens)


@pytest.mark.parametrize("slots", [[1], [0, -1, 1]])
def test_logits_may_be_of_a_wider_dtype_than_adapters(slots: list[int]) -> None:
    # `head_dtype` of vLLM has an output projection computed in float32 over a bfloat16 model.
    a, b = (weight.bfloat16() for weight in _weights(128, 7))
    logits, states = torch.randn(len(slots), 128), torch.randn(len(slots), NUM_IN).bfloat16()
    expected = logits.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row] += b[slot, 0].float() @ (a[slot, 0].float() @ states[row].float())
    _wrapper(GroupedLoRA, slots, 1).add_lora_logits(logits, states, a, b, 1.0)
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_vllms_kernel_is_still_wrong_without_an_adapter() -> None:
    assert _is_right(PunicaWrapperCPU, [0, 1, 2], 1)
    right = _is_right(PunicaWrapperCPU, [0, -1, 1, 2, 0, -1], 1)
    assert not right, "if vLLM's own kernel is also fast now, remove generator/cpu/grouped_lora.py and its patch"
