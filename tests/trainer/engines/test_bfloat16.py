"""bfloat16, in which GPUs compute by default: several ranks round no more than one rank does."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from tests.trainer.engine_params import ENGINES, engine_param
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole
from trainer.engines.pytorch.logprobs import logprobs_and_entropy

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"data_parallel_shard": 2},
    "tp2": {"tensor_parallel": 2},
    "tp2_ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


def gradients(rank: int, config: TrainerConfig) -> dict[str, Tensor]:
    engine = load_engine(config)
    local = plan(config, random_batch(LENGTHS)).split(random_batch(LENGTHS))[config.data_parallel_rank(rank)]
    engine.forward_backward(local, get_loss("importance_sampling"))
    return whole(engine, gradients=True)


def save_gradients(rank: int, one: TrainerConfig, names: tuple[str, ...], path: Path) -> None:
    """Several layouts in one start of the processes."""
    results = {name: gradients(rank, replace(one, **LAYOUTS[name])) for name in names}
    if rank == 0:
        torch.save(results, path)


def assert_ranks_round_no_more_than_one(model: Path, names: tuple[str, ...], folder: Path) -> None:
    """The bound is what one rank in bfloat16 differs by from float32: a sum over ranks in bfloat16 would exceed it."""
    one = TrainerConfig(model=model, compute_dtype="bfloat16", max_tokens_per_microbatch=50)
    exact, rounded = gradients(0, replace(one, compute_dtype="float32")), gradients(0, one)
    spawn(2, save_gradients, one, names, folder / "gradients.pt")
    for name, found in torch.load(folder / "gradients.pt").items():
        assert found.keys() == exact.keys()
        errors = {tensor: relative_error(found[tensor], exact[tensor]) for tensor in exact}
        bounds = {tensor: relative_error(rounded[tensor], exact[tensor]) for tensor in exact}
        assert sum(errors.values()) <= 1.3 * sum(bounds.values()), name
        assert max(errors[tensor] / bounds[tensor] for tensor in exact) <= 3.0, name


@pytest.mark.ranks
@pytest.mark.parametrize("names", [("fsdp2", "tp2"), pytest.param(("cp2", "pp2"), marks=pytest.mark.slow)])
def test_gpu_logic_several_ranks_round_no_more_than_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert_ranks_round_no_more_than_one(tiny_qwen3(tmp_path / "model", tied=False), names, tmp_path)


@pytest.mark.parametrize("engine", [engine_param(name) for name in ENGINES if name != "bitwise"])  # it refuses one
def test_a_float32_head_multiplies_hidden_states_of_bfloat16(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        assert hidden.dtype == weight.dtype == torch.bfloat16
        products.append((hidden.double(), weight.double(), targets))
        return logprobs_and_entropy(hidden, weight, targets, **options)

    model = tiny_llama(tmp_path / "model", tied=False, initializer_range=0.5)
    loaded = load_engine(TrainerConfig(model=model, engine=engine, head_dtype="float32"))
    for module in list(sys.modules.values()):  # wherever the engine calls it from
        if module.__dict__.get("logprobs_and_entropy") is logprobs_and_entropy and module.__name__ != __name__:
            monkeypatch.setattr(module, "logprobs_and_entropy", record)
    datum = random_batch((30,))[0]
    (found,) = loaded.forward([[datum]]).logprobs
    hidden, weight, targets = products[-1]
    expected = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(found[datum.counted], expected.numpy(), atol=1e-4)
    narrow = logprobs_and_entropy(hidden.bfloat16(), weight.bfloat16(), targets, entropy=False)[0]
    assert (narrow - expected).abs().max() > 1e-2
