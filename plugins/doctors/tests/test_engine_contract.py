"""What every engine must do, each against transformers and the loop that anyone would write in plain PyTorch."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ownloop_doctors.one_rank import MODEL_CHECKS, STATE_CHECKS, Check, Subject
from rl.lora import LoRAConfig
from rl.tiny_models import random_batch, tiny_dense, tiny_llama, tiny_qwen3
from rl.types import Datum
from tests.trainer.adapters import load_engine_or_adapter
from tests.trainer.engine_params import ENGINE_PARAMS, ENGINES, engine_param
from trainer.config import TrainerConfig
from trainer.engines import base, load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import ReferencePolicy
from trainer.engines.pytorch.logprobs import logprobs_and_entropy

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": tiny_llama,
    "qwen3_untied": lambda p: tiny_qwen3(p, tied=False),
}

UNTIED: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, tied=False),
    "mistral": lambda path: tiny_dense("mistral", path, tied=False),
    "qwen2": lambda path: tiny_dense("qwen2", path, tied=False),
    "qwen3": lambda path: tiny_qwen3(path, tied=False),
}

# FSDP2 passes the same checks in test_contract_kit.py, and FSDP1 has two ranks' gradients in test_sharded_engine.py.
SINGLE_RANKS = [engine_param(name, marks=[pytest.mark.slow] if name.startswith("fsdp") else []) for name in ENGINES]

Build = Callable[[], Engine]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "model")


@pytest.fixture(params=SINGLE_RANKS)
def build(request: pytest.FixtureRequest, model: Path) -> Build:
    """Makes engines of one kind, all of them with the same weights."""
    return lambda: load_engine(TrainerConfig(model=model, engine=request.param, compute_dtype="float32"))


@pytest.fixture(params=[*ENGINE_PARAMS, "torchtitan adapter", "fsdp2 adapter"])
def build_any(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """As `build`, of one model, and engines of adapters too."""
    engine, _, adapter = request.param.partition(" ")
    model, lora = tiny_llama(tmp_path / "tied"), LoRAConfig(rank=4) if adapter else None
    config = TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=lora)
    return lambda: load_engine_or_adapter(config)


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in MODEL_CHECKS.items()])
def test_an_engine_keeps_the_contract(check: Check, build: Build, model: Path, tmp_path: Path) -> None:
    print(check(Subject(build, model, tmp_path)))


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in STATE_CHECKS.items()])
def test_an_engine_keeps_its_state(check: Check, build_any: Build, tmp_path: Path) -> None:
    print(check(Subject(build_any, tmp_path / "tied", tmp_path)))


@pytest.mark.parametrize(
    ("engine", "make"),
    [
        *(engine_param(engine, make) for engine in ENGINES for make in UNTIED),
        engine_param("torchtitan", "smollm2", marks=[pytest.mark.seconds]),
        # A real model is large, but no other than the tiny ones.
        *(engine_param(engine, "smollm2", marks=[pytest.mark.slow]) for engine in ENGINES if engine != "torchtitan"),
    ],
)
def test_logits_equal_transformers(
    engine: str, make: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue("smollm2") if make == "smollm2" else UNTIED[make](tmp_path / "model")
    rows: list[Tensor] = []

    def record(hidden: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        rows.append(hidden @ weight.T)
        return logprobs_and_entropy(hidden, weight, *args, **kwargs)

    loaded = load_engine(TrainerConfig(model=path, engine=engine, compute_dtype="float32"))
    for module in list(sys.modules.values()):  # wherever the engine calls it from
        if module.__dict__.get("logprobs_and_entropy") is logprobs_and_entropy and module.__name__ != __name__:
            monkeypatch.setattr(module, "logprobs_and_entropy", record)
    reference = ReferencePolicy(path)
    batch = random_batch((60, 7, 33), vocab_size=reference.model.config.vocab_size)
    batch = [Datum(tokens=d.tokens, loss_inputs={"target_tokens": d.loss_inputs["target_tokens"]}) for d in batch]
    loaded.forward([batch])
    with torch.no_grad():
        difference = (rows[-1] - torch.cat([reference.logits(datum) for datum in batch])).abs().max()
    print(f"{engine} {make}: {difference:.1e}")
    assert difference <= 1e-3


def test_the_example_of_the_interface_runs_as_it_stands(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paragraphs = (base.__doc__ or "").split("\n\n")
    example = textwrap.dedent(next(text for text in paragraphs if text.startswith("    ")))
    assert len(example.splitlines()) <= 10
    monkeypatch.chdir(model.parent)
    exec(example, {})
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_world_of_another_size_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="asks for 1 ranks"):
        build()
