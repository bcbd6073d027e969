"""Every loop trains an adapter when its recipe says so: what is served is what is trained, and the base stays."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from controller.commands.resume import replayed
from controller.loops.accumulate import AccumulateConfig
from controller.loops.dapo import DAPOConfig
from controller.loops.dpo import DPOConfig
from controller.loops.grpo import GRPOConfig
from controller.loops.grpo_async import GRPOAsyncConfig
from controller.loops.ppo import PPOConfig
from controller.loops.sft import SFTConfig
from controller.runs.checkpoints import checkpoint_of, export_checkpoint
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig
from rl.algorithms.actor_critic import PPOParams
from rl.data.sources import JsonlExamples, JsonlPreferences
from tests.controller.loops.lora_runs import TRAINER, adapter_trained, lora_options, sampled_options
from tests.generator.served_models import served_llama

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

_ADAPTER = Path("adapter") / "adapter_model.safetensors"


def _recipe(loop: str, model: Path) -> LoopConfig:
    """Two steps of a loop."""
    common, sampled = lora_options(model), sampled_options()
    lines = [{"prompt": f"w{n} w40", "completion": "w5", "chosen": "w6", "rejected": "w7"} for n in range(10, 40)]
    data = model.with_name("data.jsonl")
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    match loop:
        case "grpo":
            return GRPOConfig(**common, **sampled)
        case "grpo_async":
            return GRPOAsyncConfig(**common, **sampled, max_staleness=1)
        case "dapo":
            return DAPOConfig(**common, **sampled)
        case "ppo":
            critic = replace(TRAINER, head="value")
            options: dict[str, Any] = {"critic": critic, "critic_learning_rate": 1e-2}
            return PPOConfig(**common, **sampled, **options, ppo=PPOParams(kl_coef=0.02, minibatches_per_epoch=1))
        case "accumulate":
            return AccumulateConfig(**common, **sampled, tokens_per_step=150, kl_target=1.0)
        case "sft":
            return SFTConfig(**common, data=JsonlExamples(path=data), examples_per_step=8, max_tokens=64)
        case _:
            return DPOConfig(**common, data=JsonlPreferences(path=data), pairs_per_step=8, max_tokens=64)


# Each loop takes its roles from the same place, so `make test` has the one that exports and replays too.
_LATER = [
    pytest.param(loop, marks=pytest.mark.slow) for loop in ("ppo", "grpo_async", "dapo", "accumulate", "sft", "dpo")
]


@pytest.mark.parametrize("loop", ["grpo", *_LATER])
def test_a_loop_trains_and_serves_an_adapter(loop: str, tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = _recipe(loop, model)
    steps, folder = adapter_trained(config, model, tmp_path / "run")
    if loop not in ("sft", "dpo", "grpo_async"):  # the second step's tokens are of the adapter that was pushed
        assert all(row["logprob_mismatch_max"] < 1e-4 for row in steps)
    if loop == "ppo":
        assert abs(steps[0]["kl_reference"]) < 1e-6 < 1e-4 < abs(steps[1]["kl_reference"])
    if loop == "grpo":
        _check_checkpoint(config, folder)
        _check_replay(config, folder)


def _check_checkpoint(config: LoopConfig, folder: RunFolder) -> None:
    """The newest checkpoint is exported as the trained model, with its adapter beside it."""
    exported, trained = folder.path / "exported", folder.path / "model"
    newest = checkpoint_of(folder.path, None)
    asyncio.run(export_checkpoint(config, newest, exported, folder.logs / "export", lambda _: None))
    _assert_same_tensors(exported / "model.safetensors", trained / "model.safetensors")
    _assert_same_tensors(exported / _ADAPTER, trained / _ADAPTER)


def _check_replay(config: LoopConfig, recorded: RunFolder) -> None:
    """An adapter that trains on the recorded rollouts becomes the one that trained on them first."""
    config = replayed(config, recorded.rollouts)
    again = RunFolder(recorded.path.with_name("replayed"), config)
    asyncio.run(config.loop()(config, again, Console(io.StringIO())))
    _assert_same_tensors(again.path / "model" / _ADAPTER, recorded.path / "model" / _ADAPTER)


def _assert_same_tensors(file: Path, other: Path) -> None:
    ours, theirs = load_file(file), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
