"""Muon's step: against NumPy and torch's own, in every layout, with AdamW for the rest, resumed, and refused."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams, MuonParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole
from trainer.engines.pytorch.optimizer import Optimizer, is_hidden_matrix

Array = NDArray[np.float64]
SHAPES = {"tall": (30, 8), "wide": (6, 20), "experts": (3, 5, 7), "lm_head": (9, 4), "norm": (11,)}
BATCH = random_batch(LENGTHS)
PARAMS = MuonParams(learning_rate=1e-3, weight_decay=0.1)


def _expected(gradients: list[Array], params: MuonParams, start: Array) -> Array:
    """Parameters after a step with each gradient: the formulas of the pages that are cited."""
    value, mean = start.copy(), np.zeros_like(start)
    for gradient in gradients:
        mean = params.beta1 * mean + (1 - params.beta1) * gradient
        x = params.beta1 * mean + (1 - params.beta1) * gradient if params.nesterov else mean
        x = x / np.sqrt((x**2).sum(axis=(-2, -1), keepdims=True))
        for _ in range(params.num_iterations):
            gram = x @ np.swapaxes(x, -1, -2)
            x = 3.4445 * x - 4.775 * gram @ x + 2.0315 * gram @ gram @ x
        size = 0.2 * np.sqrt(max(value.shape[-2:]))
        value = value * (1 - params.learning_rate * params.weight_decay) - params.learning_rate * size * x
    return value


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_take_the_formulas_step_others_adamws(nesterov: bool) -> None:
    random = torch.Generator().manual_seed(0)
    starts = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    gradients = {name: [torch.randn(shape, generator=random) for _ in range(4)] for name, shape in SHAPES.items()}
    params = MuonParams(learning_rate=1e-2, weight_decay=0.1, nesterov=nesterov, num_iterations=4)
    parameters = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    optimizer = Optimizer(parameters)
    others = {name: nn.Parameter(starts[name].clone()) for name in ("lm_head", "norm")}
    adamw = torch.optim.AdamW(others.values(), lr=1e-2, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].clone()
        for name, parameter in others.items():
            parameter.grad = gradients[name][step].clone()
        optimizer.step(params, 1.0)
        adamw.step()
    for name in ("tall", "wide", "experts"):
        expected = _expected([each.double().numpy() for each in gradients[name]], params, starts[name].double().numpy())
        np.testing.assert_allclose(parameters[name].detach(), expected, rtol=0, atol=1e-6)
    for name, parameter in others.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-7)


def test_it_agrees_with_torchs_own_muon_to_its_bfloat16() -> None:
    start, gradients = torch.zeros(16, 24), torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Optimizer({"w": ours})
    muon = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step(MuonParams(learning_rate=0.1), 1.0)
        muon.step()
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < 0.02


def test_moments_elsewhere_and_in_bfloat16_take_the_same_steps() -> None:
    found: list[torch.Tensor] = []
    for dtype, host in ((torch.float32, None), (torch.float32, torch.device("cpu")), (torch.bfloat16, None)):
        parameter = nn.Parameter(torch.zeros(8, 12))
        optimizer = Optimizer({"w": parameter}, dtype=dtype)
        for step in range(5):
            parameter.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            optimizer.step(replace(PARAMS, beta2=0.95), 1.0, fetch_to=host)
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1])
    assert 0 < float((found[0] - found[2]).norm() / found[0].norm()) < 0.02


@pytest.mark.stranger("2.C13")
def test_hidden_matrices_are_not_embeddings_heads_biases_or_vectors() -> None:
    matrix, vector, stack = torch.zeros(4, 4), torch.zeros(4), torch.zeros(2, 4, 4)
    assert is_hidden_matrix("model.layers.0.self_attn.q_proj.weight", matrix)
    assert is_hidden_matrix("model.layers.0.mlp.experts.gate_proj", stack)
    names = ["model.embed_tokens.weight", "lm_head.weight", "score.weight", "visual.pos_embed.weight", "wpe.weight"]
    names += ["layers.0.mlp.experts.gate_up_proj_bias", "layers.0.mlp.experts.down_proj.bias", "attn.q_norm.weight"]
    names += ["vision_model.embeddings.position_embedding.weight", "model.embed_tokens_per_layer.weight"]
    for name in names:
        assert not is_hidden_matrix(name, matrix)
    assert not is_hidden_matrix("model.layers.0.mlp.shared_expert_gate.weight", torch.zeros(1, 4))
    assert not is_hidden_matrix("model.norm.weight", vector)
    assert not is_hidden_matrix("model.layers.0.conv1d.weight", stack)


def _config(model: Path, **layout: Any) -> TrainerConfig:
    return TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, **layout)


def _step(engine: Engine, config: TrainerConfig, params: AdamParams, rank: int = 0) -> None:
    local_batch = plan(config, BATCH).split(BATCH)[config.data_parallel_rank(rank)]
    engine.forward_backward(local_batch, get_loss("cross_entropy"))
    engine.optim_step(params, 0.01)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard": 2},
    "replicate": {"data_parallel_replicate": 2},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2, "pipeline_schedule": "1F1B"},
    "fsdp2": {"data_parallel_shard": 2, "engine": "fsdp2"},
}


def _layouts(rank: int, model: Path, layouts: Mapping[str, dict[str, Any]], directory: Path) -> None:
    for name, layout in layouts.items():
        config = _config(model, **layout)
        engine = load_engine(config)
        for _ in range(2):
            _step(engine, config, PARAMS, rank)
        parameters = whole(engine)
        if rank == 0:
            torch.save(parameters, directory / name)


def assert_layouts_take_the_steps_of_one_rank(model: Path, layouts: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """Two steps of Muon by two ranks."""
    spawn(2, _layouts, model, layouts, folder)
    config = _config(model)
    engine = load_engine(config)
    before = {name: tensor.clone() for name, tensor in whole(engine).items()}
    for _ in range(2):
        _step(engine, config, PARAMS)
    expected = whole(engine)
    for layout in layouts:
        found = torch.load(folder / layout)
        moved = {name: (tensor - before[name], expected[name] - before[name]) for name, tensor in found.items()}
        assert {name: error for name, pair in moved.items() if (error := relative_error(*pair)) > 1e-4} == {}, layout


@pytest.mark.ranks
def test_every_layout_takes_the_steps_of_one_rank(tmp_path: Path) -> None:
    assert_layouts_take_the_steps_of_one_rank(tiny_llama(tmp_path / "model", tied=False), LAYOUTS, tmp_path)


def test_a_run_changes_between_optimizers_and_resumes_exactly(tmp_path: Path) -> None:
    config = _config(tiny_llama(tmp_path / "model"))
    engine = load_engine(config)
    for params in (AdamParams(learning_rate=1e-3), PARAMS):
        _step(engine, config, params)
    engine.save_checkpoint(tmp_path / "saved")
    again = load_engine(config)
    again.load_checkpoint(tmp_path / "saved")
    for each in (engine, again):
        for params in (PARAMS, AdamParams(learning_rate=1e-3)):
            _step(each, config, params)
    expected = whole(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole(again).items())


KINDS = {"adamw": AdamParams(learning_rate=1e-3), "muon": MuonParams(learning_rate=1e-3)}


def _largest_move(engine: Engine, config: TrainerConfig, params: AdamParams) -> float:
    """Of an element, in learning rates. A singular value of Muon's update is at most 1.3 x 0.2 sqrt(larger side)."""
    before = {name: tensor.detach().clone() for name, tensor in engine.hf_parameters()}
    _step(engine, config, params)
    moves = {name: float((tensor.detach() - before[name]).abs().max()) for name, tensor in engine.hf_parameters()}
    sides = {
        name: max(tensor.shape) ** 0.5 * 0.26 if params is KINDS["muon"] else 1.0 for name, tensor in before.items()
    }
    return max(move / max(sides[name], 1.0) for name, move in moves.items()) / params.learning_rate


@pytest.mark.stranger("2.C1")
@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.permutations(KINDS, 2), *(pytest.param(kind, kind, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_no_element_leaps_after_a_change_of_optimizer_engine_dtype_or_place(
    first: str, second: str, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model")
    for adapter, dtype in itertools.product((False, True), ("float32", "bfloat16")):
        saved, lora = tmp_path / f"{adapter}-{dtype}", LoRAConfig(rank=4) if adapter else None
        config = _config(model, moments_dtype=dtype, lora=lora)
        engine = _policy(config)
        for _ in range(6):
            _step(engine, config, KINDS[first])
        engine.save_checkpoint(saved)
        again = _policy(config)
        again.load_checkpoint(saved)
        again.to("cpu", optimizer=True)
        assert _largest_move(again, config, KINDS[second]) == _largest_move(engine, config, KINDS[second]) < 2
        if second == "adamw" and not adapter:
            for other_dtype in ("float32", "bfloat16"):
                config = _config(model, moments_dtype=other_dtype, engine="fsdp2")
                engine = load_engine(config)
                engine.load_checkpoint(saved)
                assert _largest_move(engine, config, KINDS[second]) < 2


def _policy(config: TrainerConfig) -> Engine:
    engine = load_engine(config)
    return engine if config.lora is None else engine.adapter("a", config.lora)


@pytest.mark.stranger("2.C1")
def test_adamw_starts_anew_after_muon_and_muon_goes_on_after_adamw() -> None:
    gradients = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(2))
    weight, fresh = nn.Parameter(torch.zeros(8, 12)), nn.Parameter(torch.zeros(8, 12))
    optimizer, reference = Optimizer({"w": weight}), torch.optim.AdamW([fresh], lr=1e-3, betas=(0.9, 0.95))
    for gradient, kind in zip(gradients, ("adamw", "muon", "adamw", "adamw"), strict=True):
        weight.grad, fresh.grad = gradient.clone(), gradient.clone()
        before = weight.detach().clone()
        optimizer.step(KINDS[kind], 1.0)
        if kind == "muon":
            mean = 0.95 * 0.1 * gradients[0] + 0.05 * gradients[1]
            torch.testing.assert_close(optimizer.state()["w"]["exp_avg"], mean)
            reference.state.clear()
            fresh.data.copy_(weight)
        else:
            reference.param_groups[0]["weight_decay"] = 0.0
            reference.step()
            torch.testing.assert_close(weight, fresh, rtol=0, atol=1e-8)
        assert not torch.equal(weight, before)
