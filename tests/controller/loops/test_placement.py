"""A loop whose trainer and generator share their GPUs: the same page, the same numbers, memory for one at a time."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.llm_engine import LLMEngine

from controller.loops import accumulate
from controller.loops.accumulate import AccumulateConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from generator.config import GeneratorConfig
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig
from trainer.engines.pytorch.engine import TorchEngine

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]


def colocated(model: Path) -> AccumulateConfig:
    return AccumulateConfig(
        model=str(model),
        placement="colocated",
        env=EvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64),
        sampling=SamplingParams(max_tokens=8),
        num_steps=2,
        prompts_per_step=3,
        group_size=4,
        tokens_per_step=120,  # several batches are sampled, and their gradients added up, in each step
        kl_target=1e-6,
        learning_rate=1e-3,
        num_eval=8,
    )


def note(patch: pytest.MonkeyPatch, owner: type, verb: str, before: Callable[..., None]) -> None:
    """Has `before` called with the arguments of a method, before the method itself."""
    original = getattr(owner, verb)

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        before(*args, **options)
        return original(self, *args, **options)

    patch.setattr(owner, verb, noted)


def test_gpu_logic_processes_on_the_same_gpus_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the same calls are made and nothing moves, so what is to be seen is who computes while who is away."""
    away = {"trainer": False, "generator": False}
    turns = {"trainer": 0, "generator": 0}
    levels: list[int] = []

    def to(device: str, *, model: bool, gradients: bool, optimizer: bool) -> None:
        assert model
        assert gradients
        assert optimizer == (device == "cpu"), "the optimizer's state comes in pieces"
        away["trainer"] = device == "cpu"
        turns["trainer"] += device == "cuda"

    def sleep(level: int) -> None:
        levels.append(level)
        away["generator"] = True

    def wake_up() -> None:
        away["generator"] = False
        turns["generator"] += 1

    def trains(*_: Any, **__: Any) -> None:
        assert away == {"trainer": False, "generator": True}

    def samples(*_: Any, **__: Any) -> None:
        assert away == {"trainer": True, "generator": False}

    note(monkeypatch, TorchEngine, "to", to)
    note(monkeypatch, TorchEngine, "forward_backward", trains)
    note(monkeypatch, TorchEngine, "optim_step", trains)
    note(monkeypatch, LLMEngine, "sleep", sleep)
    note(monkeypatch, LLMEngine, "wake_up", wake_up)
    note(monkeypatch, LLMEngine, "add_request", samples)
    folder = RunFolder(tmp_path / "run", config := colocated(served_llama(tmp_path / "model", tied=True)))
    assert (config.policy_config.placement, config.generator_config.placement) == ("colocated", "colocated")
    asyncio.run(accumulate.train(config, folder, Console(io.StringIO())))
    steps = [row for row in folder.metrics() if "grad_norm" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    batches = sum(row["rollout_batches"] for row in steps)
    assert batches > 2
    assert turns["trainer"] >= batches, "a turn for each batch's gradient"
    assert turns["generator"] >= batches
    assert set(levels[1:]) == {2}, "weights that were pulled are dropped, and not copied to the host"
    for row in steps:  # the weights were there after every turn, on both sides
        assert row["logprob_mismatch_max"] <= 1e-4


def test_a_loop_does_not_train_a_frozen_trainer() -> None:
    with pytest.raises(ValueError, match=r"trainer\.frozen is True; a loop trains this trainer"):
        replace(colocated(Path("model")), trainer=TrainerConfig(frozen=True))


def test_a_placement_is_one_field_for_all_processes() -> None:
    shared = colocated(Path("model"))
    split = replace(shared, placement="split")
    for config in (shared, split):
        assert {config.policy_config.placement, config.generator_config.placement} == {config.placement}
    with pytest.raises(ValueError, match="'together'"):
        replace(shared, placement="together")  # pyright: ignore[reportArgumentType]
