"""Whole runs with `numerics="bitwise"`: no mismatch, the same run twice, and an end where the two sides disagree."""

import asyncio
import dataclasses
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from controller.commands.resume import replayed
from controller.loops import grpo, grpo_async, ppo
from controller.loops.grpo import GRPOConfig
from controller.loops.grpo_async import GRPOAsyncConfig
from controller.processes.errors import TrainingStoppedError
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import is_timing
from generator.config import GeneratorConfig
from ownloop_bitwise.check import Difference, first_difference
from ownloop_bitwise.engine import BitwiseEngine
from rl.lora import LoRAConfig
from rl.rollouts.episodes import group_to_data
from rl.tiny_models import SERVABLE, tiny_dense
from rl.tiny_tasks import EvenWords
from rl.types import Completion, ForwardBackwardOutput, Group, Rollout, SamplingParams, Turn
from tests.e2e import tiny_loops
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dense("qwen3", tmp_path_factory.mktemp("model") / "model", **SERVABLE)


def recipe(model: Path, **options: Any) -> GRPOConfig:
    config = GRPOConfig(
        model=str(model),
        numerics="bitwise",
        env=EvenWords(),
        trainer=TrainerConfig(max_tokens_per_microbatch=512),
        generator=GeneratorConfig(max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9),
        num_steps=5,
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_eval=8,
        evaluate_every=3,
    )
    return replace(config, **options)


def run(loop: Any, config: Any, path: Path) -> RunFolder:
    folder = RunFolder(path, config)
    asyncio.run(loop.train(config, folder, Console(io.StringIO())))
    return folder


def values(folder: RunFolder) -> list[dict[str, float]]:
    return [{name: row[name] for name in row if not is_timing(name)} for row in folder.metrics()]


def steps(folder: RunFolder) -> list[dict[str, float]]:
    return [row for row in values(folder) if "grad_norm" in row]


def test_a_run_has_no_mismatch_and_repeats_and_replays_to_the_digit(model: Path, tmp_path: Path) -> None:
    config = recipe(model)
    first = run(grpo, config, tmp_path / "first")
    assert [row["logprob_mismatch_max"] for row in steps(first)] == [0.0] * config.num_steps
    assert {row["ratio_mean"] for row in steps(first)} == {1.0}
    assert values(run(grpo, config, tmp_path / "second")) == values(first)
    assert steps(run(grpo, replayed(config, first.rollouts), tmp_path / "replayed")) == steps(first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_an_adapter_has_no_mismatch(dtype: Any, model: Path, tmp_path: Path) -> None:
    base = recipe(model)
    config = replace(
        base,
        lora=LoRAConfig(rank=4, alpha=6.0),
        trainer=replace(base.trainer, compute_dtype=dtype),
        generator=replace(base.generator, dtype=dtype),
        learning_rate=3e-2,
    )
    rows = steps(run(grpo, config, tmp_path / "run"))
    assert [row["logprob_mismatch_max"] for row in rows] == [0.0] * config.num_steps
    assert {row["ratio_mean"] for row in rows} == {1.0}
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_run_of_windows_and_soft_caps_has_no_mismatch_and_writes_its_model(tmp_path: Path) -> None:
    model = tiny_dense("gemma2", tmp_path / "model", **SERVABLE)
    folder = run(grpo, recipe(model, num_steps=3), tmp_path / "run")
    assert [row["logprob_mismatch_max"] for row in steps(folder)] == [0.0] * 3
    trained, before = (load_file(next(each.glob("*.safetensors"))) for each in (folder.path / "model", model))
    assert trained.keys() == before.keys()
    assert all(not torch.equal(trained[name], before[name]) for name in before)


def test_a_run_in_flight_and_one_of_minibatches_go_to_their_ends(model: Path, tmp_path: Path) -> None:
    base = recipe(model, num_steps=4)
    fields: dict[str, Any] = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    config = GRPOAsyncConfig(**fields, max_staleness=2)
    assert len(steps(run(grpo_async, config, tmp_path / "async"))) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWNLOOP_TINY_LOOP", "ppo")
        patch.setenv("OWNLOOP_TINY_MODEL", str(model))
        rows = steps(run(ppo, replace(tiny_loops.recipe(), numerics="bitwise", num_steps=3), tmp_path / "ppo"))
    assert [row["logprob_mismatch_max"] for row in rows] == [0.0] * 3


def test_one_bit_of_one_weight_that_a_push_changes_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = BitwiseEngine.hf_parameters

    def damaged(self: BitwiseEngine) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in original(self):
            pushed = parameter.detach().bfloat16()
            if self.policy_version == 2 and name == "model.layers.1.mlp.up_proj.weight":
                pushed.view(torch.int16)[5, 7] ^= 1
            yield name, pushed

    monkeypatch.setattr(BitwiseEngine, "hf_parameters", damaged)
    with pytest.raises(
        TrainingStoppedError, match=r"step 3: .* of token \d+ of rollout \d of problem .* tokens differ"
    ):
        run(grpo, recipe(model), tmp_path / "run")
    folder = RunFolder(tmp_path / "run", recipe(model), resume=True)
    assert [row["step"] for row in steps(folder)] == [1, 2, 3]
    folder.close()


def test_two_paths_of_bfloat16_are_refused_before_anything_is_sampled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ownloop_bitwise.engine.bfloat16_path", lambda: "another path")
    with pytest.raises(ValueError, match=r"by another path in the trainer on .* in the generator on .*MAX_CPU_ISA="):
        run(grpo, recipe(model), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    wide = recipe(model, num_steps=1)
    wide = replace(wide, trainer=replace(wide.trainer, compute_dtype="float32"))
    assert run(grpo, replace(wide, generator=replace(wide.generator, dtype="float32")), tmp_path / "wide").metrics()


def _group() -> Group:
    """Two rollouts of two turns, the first of which began with an older version."""

    def rollout(reward: float, *versions: int) -> Rollout:
        turns = tuple(
            Turn(
                prompt_tokens=(5, 6),
                completion=Completion(
                    tokens=(7, 8, 9),
                    logprobs=(-0.5, -1.5, -reward),
                    versions=(version,) * 3,
                    text="",
                    finish_reason="stop",
                    temperature=1.0,
                ),
            )
            for version in versions
        )
        return Rollout(turns=turns, reward=reward)

    return Group(problem_id="a", prompt="", rollouts=(rollout(0, 3, 4), rollout(1, 4, 4)))


def test_only_tokens_of_the_trainers_version_are_compared() -> None:
    group = _group()
    batch = group_to_data(group, lambda rewards: rewards - rewards.mean())
    equal = [datum.loss_inputs["logprobs"].copy() for datum in batch]

    def found(rollout: int, place: int, version: int) -> Difference | None:
        changed = [each.copy() for each in equal]
        changed[rollout][place] = np.nextafter(changed[rollout][place], np.float32(-9))
        output = ForwardBackwardOutput(logprobs=tuple(changed), entropy=None, metrics={})
        return first_difference([group], batch, output, version)

    assert found(0, 2, 4) is None  # version 3 sampled it
    difference = found(0, 7, 4)
    assert difference is not None
    assert (difference.problem_id, difference.rollout, difference.token) == ("a", 0, 4)
    assert (difference.generators, difference.num_different, difference.num_compared) == (-1.5, 1, 9)
    assert found(1, 1, 4) is not None
    assert found(1, 1, 5) is None
