"""Runs of loops that train an adapter of a tiny model, and what each must leave: the adapter, and the base itself."""

import asyncio
import io
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig
from generator.config import GeneratorConfig
from rl.lora import LoRAConfig
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig

TRAINER = TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512)


def lora_options(model: Path) -> dict[str, Any]:
    """Two steps of any loop."""
    return {
        "model": str(model),
        "lora": LoRAConfig(rank=8, alpha=16),
        "trainer": TRAINER,
        "num_steps": 2,
        "num_eval": 8,
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "learning_rate": 1e-2,
    }


def sampled_options() -> dict[str, Any]:
    """Those that a loop has which learns from rollouts."""
    return {
        "env": EvenWords(),
        "generator": GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64),
        "sampling": SamplingParams(max_tokens=8),
        "prompts_per_step": 4,
        "group_size": 4,
    }


def adapter_trained(config: LoopConfig, model: Path, path: Path) -> tuple[list[dict[str, float]], RunFolder]:
    """Trains, and checks what is exported. Returns the rows of the two optimizer steps and the run's folder."""
    folder = RunFolder(path, config)
    asyncio.run(config.loop()(config, folder, Console(io.StringIO())))
    steps = [row for row in folder.metrics() if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert {log.name for log in folder.logs.iterdir() if "reference" in log.name} == set()  # no second copy
    _check_exports(folder.path / "model", model)
    return steps, folder


def _check_exports(merged: Path, base: Path) -> None:
    """The adapter changes the model, as peft has it on the base, and the merged model is that very change."""
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        before = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, merged / "adapter")(tokens).logits
        after = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (adapted - before).abs().max() > 1e-3
    assert (after - adapted).abs().max() < 1e-4
    embedding = "model.embed_tokens.weight"
    ours, theirs = (load_file(folder / "model.safetensors")[embedding] for folder in (merged, base))
    assert torch.equal(ours, theirs)
