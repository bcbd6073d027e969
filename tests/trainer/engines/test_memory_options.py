"""Less memory for the same numbers: frozen models in the compute dtype, moments that come to the device in pieces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from trainer.config import TrainerConfig, trainer_env
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.pytorch import optimizer
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.optimizer import Optimizer

BATCH = random_batch((1, 17, 5, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("memory") / "model", tied=False)


@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_gpu_logic_a_frozen_model_takes_two_bytes_a_parameter(model: Path, engine: str) -> None:
    check_a_frozen_model_takes_half(model, engine)


def check_a_frozen_model_takes_half(model: Path, engine: str) -> None:
    config: dict[str, Any] = {"model": model, "engine": engine, "compute_dtype": "bfloat16"}
    trained, frozen = load_engine(TrainerConfig(**config)), load_engine(TrainerConfig(**config, frozen=True))
    sizes = [sum(p.nbytes for _, p in each.hf_parameters()) for each in (trained, frozen)]
    assert sizes[0] == 2 * sizes[1]  # and the trained one has copies to compute with, which hold as much as the other
    outputs = [each.forward([BATCH], entropy=True) for each in (trained, frozen)]
    for one, other in zip(*(output.logprobs for output in outputs), strict=True):
        assert np.array_equal(one, other)


def test_gpu_logic_a_frozen_model_refuses_to_be_trained_in_words(model: Path) -> None:
    engine = load_engine(TrainerConfig(model=model, compute_dtype="float32", frozen=True))
    with pytest.raises(ValueError, match=r"forward_backward: the model is frozen; without TrainerConfig\.frozen"):
        engine.forward_backward([BATCH], get_loss("cross_entropy"))


def test_gpu_logic_rows_of_new_lengths_do_not_scatter_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert trainer_env(TrainerConfig(), has_gpu=True)[names[0]] == "expandable_segments:True"
    assert "MALLOC_ARENA_MAX" not in trainer_env(TrainerConfig(), has_gpu=True)
    assert "MALLOC_ARENA_MAX" in (on_cpu := trainer_env(TrainerConfig(), has_gpu=False))
    assert names[0] not in on_cpu
    monkeypatch.setenv(names[1], "max_split_size_mb:64")
    assert names[0] not in trainer_env(TrainerConfig(), has_gpu=True), "what a user has set stays"


def stepped(piece_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequence[Any], list[int]]:
    """Parameters and moments after three steps, and the bytes of moments of each part of a step."""
    torch.manual_seed(0)
    shapes = {"a": (30, 10), "b": (7,), "c": (1000,), "d": (5, 5), "e": (200,)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    adam, sizes = Optimizer(parameters), list[int]()
    inner = adam._adamw  # pyright: ignore[reportPrivateUsage]
    step = inner.step

    def counted() -> None:
        sizes.append(sum(2 * p.nbytes for group in inner.param_groups for p in group["params"]))
        step()

    monkeypatch.setattr(inner, "step", counted)
    if piece_bytes is not None:
        monkeypatch.setattr(optimizer, "PIECE_BYTES", piece_bytes)
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        params = AdamParams(learning_rate=1e-2, weight_decay=0.1, learning_rate_multipliers={"c": 0.5})
        adam.step(params, 0.1, fetch_to=None if piece_bytes is None else torch.device("cpu"))
    return [*(p.detach() for p in parameters.values()), *(v for s in adam.state().values() for v in s.values())], sizes


def test_gpu_logic_offloaded_moments_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, whole = stepped(None, monkeypatch)
    actual, pieces = stepped(3000, monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert whole == 3 * [2 * 4 * (300 + 7 + 1000 + 25 + 200)]
    assert pieces == 3 * [2 * 4 * (300 + 7 + 25), 2 * 4 * 200, 2 * 4 * 1000]  # one that is larger comes alone


def bytes_per_parameter(engine: TorchEngine) -> list[float]:
    """Of the parameters, the copies to compute with, the gradients and AdamW's moments after a call and a step."""
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    engine.optim_step(AdamParams(learning_rate=1e-4))
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    held = [p for _, p in engine.hf_parameters()]
    own = {p.data_ptr() for p in held}
    model, adam = engine._model, engine._optimizer  # pyright: ignore[reportPrivateUsage]
    copies = [p for p in model.parameters() if p.data_ptr() not in own]
    moments = [m for state in adam.state().values() for name, m in state.items() if name != "step"]
    grads = [p.grad for p in held if p.grad is not None]
    num = sum(p.numel() for p in held)
    return [sum(t.nbytes for t in tensors) / num for tensors in (held, copies, grads, moments)]


def test_gpu_logic_the_documented_bytes_are_those_of_the_tensors(model: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    rows = dict[str, list[float]]()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1].isdigit():
            rows[cells[0]] = [float(cell) for cell in cells[1:]]
    assert all(sum(row[:4]) == row[4] for row in rows.values())
    found: dict[str, list[float]] = {}
    for title, options in {
        '"bfloat16"': {"compute_dtype": "bfloat16"},
        '"float32"': {"compute_dtype": "float32"},
        "`moments_dtype`": {"compute_dtype": "bfloat16", "moments_dtype": "bfloat16"},
    }.items():
        engine = load_engine(TrainerConfig(model=model, **options))  # pyright: ignore[reportArgumentType]
        assert isinstance(engine, TorchEngine)
        found[title] = bytes_per_parameter(engine)
    base = load_engine(TrainerConfig(model=model, compute_dtype="bfloat16", lora=LoRAConfig(rank=4)))
    adapter = base.adapter("a", LoRAConfig(rank=4))
    assert isinstance(adapter, TorchEngine)
    found["of an adapter"] = bytes_per_parameter(adapter)
    found["model under"] = [sum(p.nbytes for _, p in base.hf_parameters()) / _numel(base), 0, 0, 0]
    for name, measured in found.items():
        (row,) = (row for title, row in rows.items() if name in title)
        assert measured == row[:4], name


def _numel(engine: Engine) -> int:
    return sum(p.numel() for _, p in engine.hf_parameters())
