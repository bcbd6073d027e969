"""The megatron_fsdp engine: what it refuses before any process starts, and the contract, on CPUs by `cpu_streams`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ownloop_doctors.comparisons import require_close, require_equal
from ownloop_doctors.one_rank import MICROBATCHES, MODEL_CHECKS, STATE_CHECKS, Check, Subject
from ownloop_doctors.several_ranks import LAYOUT_CHECKS, LayoutResults, layout_script, run_layout
from plugins.doctors.tests.ranks import script
from plugins.megatron.tests.cpu_streams import build_on_cpu, install
from rl.losses import get_loss
from rl.tiny_models import critic_batch, tiny_critic, tiny_dense, tiny_llama, tiny_qwen3
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import gradients
from trainer.engines.model_check import check_model

MODELS: dict[str, Callable[[Path], Path]] = {
    "tied": tiny_llama,
    "untied": lambda path: tiny_qwen3(path, tied=False),
}
CHECKS = {**MODEL_CHECKS, **STATE_CHECKS}
FAST = {"gradients"}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_the_package()
    if not torch.cuda.is_available():
        install(monkeypatch.setattr)


def skip_without_the_package() -> None:
    """Unlike `pytest.importorskip`, does not import the package, which the engine does in its own way."""
    if find_spec("megatron_fsdp") is None:
        pytest.skip("the package 'megatron_fsdp' is not installed")


def config_of(model: Path, **options: Any) -> TrainerConfig:
    options = {"engine": "megatron_fsdp", "compute_dtype": "float32"} | options
    return TrainerConfig(model=model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'megatron_fsdp', which needs CUDA, and this host has no GPU; here the engine 'fsdp2' trains"),
        ({"data_parallel_replicate": 2}, "data_parallel_replicate is 2; .* must be 1. The engine 'fsdp2' has replicas"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2; engine 'megatron_fsdp' only shards data"),
        ({"engine_args": {"zero_dp_strategy": "optim"}}, r"\['zero_dp_strategy'\] is 'optim'; .* 'optim_grads_params'"),
        ({"engine_args": {"overlap_grad_reduc": True}}, "has no such option; did you mean 'overlap_grad_reduce'"),
        ({"engine_args": {"overlap_grad_reduce": 1}}, r"\['overlap_grad_reduce'\] is 1; it must be True or False"),
        ({"engine_args": {"device_mesh": None}}, r"\['device_mesh'\] follows from the layout or the engine"),
    ],
)
def test_what_megatron_fsdp_cannot_do_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        check_model(config_of(tiny_llama(tmp_path / "model"), **options))


@pytest.mark.usefixtures("streams")
def test_megatron_core_stays_importable_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("megatron.core")
    for name in list(sys.modules):
        if name.startswith("megatron_fsdp") or name == "ownloop_megatron.mfsdp._compat":
            monkeypatch.delitem(sys.modules, name)
    import ownloop_megatron.mfsdp._compat as api

    assert api.fully_shard_model.__module__ == "megatron_fsdp.fully_shard"
    settings = sys.modules["megatron_fsdp.fully_shard"].__dict__["DistributedDataParallelConfig"]
    assert settings.__module__ == "megatron_fsdp.distributed_data_parallel_config"
    assert sys.modules["megatron.core"] is core


@pytest.mark.seconds
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("check", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CHECKS])
def test_it_keeps_the_contract(check: str, model: str, tmp_path: Path) -> None:
    path = MODELS[model](tmp_path / "model")
    run: Check = CHECKS[check]
    print(run(Subject(partial(build_on_cpu, config_of(path)), path, tmp_path)))


@pytest.mark.slow
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"compute_dtype": "bfloat16"},
        {"engine_args": {"overlap_grad_reduce": False, "disable_bucketing": True}},
        {"engine_args": {"enable_fine_grained_param_gather": True, "zero_dp_strategy": 3}},
    ],
)
def test_options_change_no_gradient(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_dense("mistral", tmp_path / "model", tied=False)
    dtype = options.get("compute_dtype", "float32")
    engines = (
        build_on_cpu(config_of(model, **options)),
        load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype=dtype)),
    )
    for _ in range(2):
        for engine in engines:
            engine.forward_backward(MICROBATCHES, get_loss("importance_sampling"))
        require_close("gradients", gradients(engines[0]), gradients(engines[1]), 1e-5 if dtype == "float32" else 1e-2)
        for engine in engines:
            engine.optim_step(AdamParams(learning_rate=1e-3, eps=1e-3))


@pytest.mark.slow
@pytest.mark.usefixtures("streams")
def test_a_critic_has_the_gradients_of_fsdp2(tmp_path: Path) -> None:
    model = tiny_critic(tmp_path / "critic")
    batch = [critic_batch((1, 17, 5, 40))]
    engines = (
        build_on_cpu(config_of(model, head="value")),
        load_engine(config_of(model, head="value", engine="fsdp2")),
    )
    for engine in engines:
        engine.forward_backward(batch, get_loss("value", {"clip_range": 0.3}))
    require_close("gradients", gradients(engines[0]), gradients(engines[1]), 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_buffers_hold_no_memory_and_come_back(dtype: str, tmp_path: Path) -> None:
    engine = build_on_cpu(config_of(tiny_llama(tmp_path / "model"), compute_dtype=dtype))
    before, logprobs = parameters(engine), engine.forward(MICROBATCHES).logprobs
    main: Any = engine.__dict__["_main"]
    host, elsewhere = torch.device("cpu"), torch.device("meta")
    main.to(host, elsewhere)
    assert sum(storage.nbytes() for storage in main._storages()) == 0
    require_equal("parameters", parameters(engine), before)
    main.to(host, host)
    assert all(storage.nbytes() for storage in main._storages())
    require_equal("parameters", parameters(engine), before)
    for mine, expected in zip(engine.forward(MICROBATCHES).logprobs, logprobs, strict=True):
        assert (mine == expected).all()


def parameters(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.hf_parameters()}


@pytest.fixture(scope="module", params=MODELS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LayoutResults:
    """The results of two ranks and those of two ranks of the engine `fsdp2`."""
    skip_without_the_package()
    directory = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](directory / "model")
    config = config_of(model, max_tokens_per_microbatch=50, data_parallel_shard=2, activation_checkpointing="full")
    build, of_ranks = (load_engine, script) if torch.cuda.is_available() else (build_on_cpu, layout_script)
    many = run_layout(of_ranks, build, config, directory / "many")
    other = run_layout(of_ranks, load_engine, replace(config, engine="fsdp2"), directory / "fsdp2")
    return LayoutResults(config, many, other, directory / "many", build)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("name", LAYOUT_CHECKS)
def test_two_ranks_compute_what_fsdp2_computes(results: LayoutResults, name: str) -> None:
    print(LAYOUT_CHECKS[name](results))
