"""A call that runs out of a GPU's memory raises, frees what it took, and leaves the engine as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine

SMALL, LARGE = random_batch((60, 40)), random_batch((128,) * 32)
PARAMS = AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)
MIB = 1 << 20
BIG: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
"""Activations of `LARGE` and moments do not fit into blocks that torch's allocator keeps anyway."""


def limit(more_bytes: int) -> None:
    """Lets torch's allocator take so many bytes more, of those that it has not taken yet."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)


def run_out_of_memory(call: Callable[[], object], more_bytes: int | None = None) -> None:
    """The call must run out of memory: of so many bytes, or because it calls `limit` itself.

    A context manager of a generator would keep the error, and with it the call's tensors, until Python's collector ran.
    """
    if more_bytes is not None:
        limit(more_bytes)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def leaves_no_memory(logprobs: torch.Tensor, entropy: Any, inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss whose backward pass has no memory."""
    del entropy, inputs
    limit(0)
    return -logprobs.sum(), {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torchtitan", "fsdp2"])
def test_a_call_without_memory_leaves_the_engine_as_it_was(name: str, tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model", **BIG), engine=name, compute_dtype="float32")
    failing, other = load_engine(config), load_engine(config)
    loss = get_loss("cross_entropy")

    def accumulate(engine: Engine) -> None:
        engine.forward_backward([SMALL], loss)

    accumulate(failing)
    held = torch.cuda.memory_allocated()
    run_out_of_memory(lambda: failing.forward_backward([LARGE], loss), 64 * MIB)
    run_out_of_memory(lambda: failing.forward_backward([LARGE], get_loss(leaves_no_memory)))
    assert torch.cuda.memory_allocated() <= held + MIB
    run_out_of_memory(lambda: failing.optim_step(PARAMS, grad_scale=0.1), 16 * MIB)  # moments take 60
    accumulate(other)
    for engine in (failing, other):
        accumulate(engine)
        engine.optim_step(PARAMS, grad_scale=0.1)
    for (key, ours), (_, expected) in zip(failing.hf_parameters(), other.hf_parameters(), strict=True):
        assert torch.equal(ours, expected), key
