"""`rl.system.hf_config` against PyTorch's own counter, on transformers' models."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rl.data.packing import ModelFlops, pack_row
from rl.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from rl.types import Datum

LENGTH = 12


def datum(tokens: list[int], prompt: int = 0) -> Datum:
    """A datum whose tokens are scored after the prompt."""
    targets = np.asarray([*tokens[1:], 0])
    weights = (np.arange(len(tokens)) >= prompt).astype(np.float32)
    return Datum(tokens=np.asarray(tokens), loss_inputs={"target_tokens": targets, "weights": weights})


def counted(model: Path, *, backward: bool) -> float:
    """What PyTorch counts for one document. Its attention computes the whole square."""
    network: Any = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        logits = network(input_ids=tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("make", [partial(tiny_llama, tied=True), partial(tiny_qwen3, tied=False), tiny_qwen3_moe])
def test_operations_are_those_that_pytorch_counts(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    flops = ModelFlops.of(model)
    row = pack_row([datum(list(range(LENGTH)))], share_prefixes=False)
    above_the_diagonal = flops.per_pair * LENGTH * (LENGTH - 1) / 2
    assert flops.forward(row) + above_the_diagonal == counted(model, backward=False)
    assert flops.training(row) + 3 * above_the_diagonal == counted(model, backward=True)


def test_a_frozen_model_needs_no_gradient_of_its_weights(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", tied=True)
    whole, frozen = ModelFlops.of(model), ModelFlops.of(model, frozen=True)
    row = pack_row([datum(list(range(LENGTH)))], share_prefixes=False)
    weights = whole.per_token * LENGTH + whole.per_scored * LENGTH
    assert whole.training(row) - frozen.training(row) == weights


def test_what_is_shared_counts_once(tmp_path: Path) -> None:
    flops = ModelFlops.of(tiny_llama(tmp_path / "model", tied=True))
    batch = [datum([1, 2, 3, 4, 5], prompt=2), datum([1, 2, 3, 6, 7, 8], prompt=2)]
    shared, alone = (flops.forward(pack_row(batch, share_prefixes=share)) for share in (True, False))
    # Three tokens of the prefix are there once: they attend to 1 + 2 + 3 positions. What is scored is the same.
    assert alone - shared == 3 * flops.per_token + 6 * flops.per_pair
