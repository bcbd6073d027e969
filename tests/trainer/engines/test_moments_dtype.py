"""AdamW's moments in bfloat16: nearly the numbers of float32, and everything else as with float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import spawn, whole
from trainer.engines.pytorch.optimizer import Optimizer

BATCH = random_batch((5, 17, 8, 30))
PARAMS = AdamParams(learning_rate=1e-3, beta2=0.98, weight_decay=0.1)
SHAPES = {"a": (60, 40), "b": (7,), "c": (33, 5)}


def gradients(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    scales = {"a": 1e-3, "b": 1.0, "c": 30.0}
    return {name: scales[name] * (torch.randn(shape, generator=random) + 0.2) for name, shape in SHAPES.items()}


def stepped(dtype: torch.dtype, *, fetch_to: torch.device | None = None) -> tuple[list[torch.Tensor], Optimizer]:
    """Parameters after fifty steps whose hyper-parameters change, and their optimizer."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = Optimizer(parameters, dtype=dtype)
    for step in range(50):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        rate, beta2 = 1e-3 * (1 - step / 100), 0.95 if step < 25 else 0.99
        params = AdamParams(learning_rate=rate, beta2=beta2, weight_decay=0.01 * step, grad_clip_norm=0.0)
        optimizer.step(params, 1.0, fetch_to=fetch_to)
    return [parameter.detach() for parameter in parameters.values()], optimizer


def test_gpu_logic_bfloat16_moments_stay_near_float32() -> None:
    exact, _ = stepped(torch.float32)
    halved, optimizer = stepped(torch.bfloat16)
    for one, other in zip(halved, exact, strict=True):
        error = float((one - other).norm() / other.norm())
        assert 0 < error < 0.01, "the moments are in bfloat16, and that costs little"
    moments = [m for state in optimizer.state().values() for name, m in state.items() if name != "step"]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    on_host, _ = stepped(torch.bfloat16, fetch_to=torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(on_host, halved, strict=True))


def step(engine: Engine) -> None:
    engine.forward_backward([BATCH[:2], BATCH[2:]], get_loss("cross_entropy"))
    engine.optim_step(PARAMS, 0.01)


def check_checkpoints(config: TrainerConfig, folder: Path) -> None:
    """A run goes on from a checkpoint with exactly the numbers that it would have had."""
    engine = load_engine(config)
    step(engine)
    engine.save_checkpoint(folder / "saved")
    step(engine)
    again = load_engine(config)
    again.load_checkpoint(folder / "saved")
    step(again)
    expected = whole(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole(again).items())


def check_resumes_from_float32(name: str, tmp_path: Path) -> None:
    """By the name of the engine."""
    model = tiny_llama(tmp_path / "model")
    options: dict[str, Any] = {"model": model, "engine": name, "compute_dtype": "float32"}
    halved = TrainerConfig(**options, moments_dtype="bfloat16")
    check_checkpoints(halved, tmp_path)
    engine, other = load_engine(TrainerConfig(**options)), load_engine(halved)
    step(engine)
    engine.save_checkpoint(tmp_path / "float32")
    other.load_checkpoint(tmp_path / "float32")
    before = whole(other)
    for each in (engine, other):
        step(each)
    for name, tensor in whole(other).items():
        moved = whole(engine)[name] - before[name]
        assert float((tensor - before[name] - moved).norm()) < 0.02 * float(moved.norm()), name


def test_gpu_logic_a_run_resumes_from_float32_too(tmp_path: Path) -> None:
    check_resumes_from_float32("torchtitan", tmp_path)


def test_gpu_logic_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), compute_dtype="float32", moments_dtype="bfloat16")
    engine, untouched = load_engine(config), load_engine(config)
    for each in (engine, untouched):
        step(each)
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    for _, parameter in engine.hf_parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    assert engine.optim_step(PARAMS).skipped
    for each in (engine, untouched):
        step(each)
    expected = whole(untouched)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole(engine).items())


def test_gpu_logic_a_beta2_beyond_bfloat16_is_refused() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(3))}
    params = AdamParams(learning_rate=1e-3, beta2=0.999)
    Optimizer(parameters).check(params, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"beta2 is 0\.999; with .*moments_dtype 'bfloat16' it must be at most 0\.99"):
        Optimizer(parameters, dtype=torch.bfloat16).check(params, torch.device("cpu"))


def _sharded(rank: int, model: Path, folder: Path) -> None:
    del rank
    config = TrainerConfig(model=model, compute_dtype="float32", moments_dtype="bfloat16", data_parallel_shard=2)
    check_checkpoints(config, folder)


@pytest.mark.ranks
@pytest.mark.slow
def test_gpu_logic_sharded_moments_go_there_and_back(tmp_path: Path) -> None:
    spawn(2, _sharded, tiny_llama(tmp_path / "model"), tmp_path)
