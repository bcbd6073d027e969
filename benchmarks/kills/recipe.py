"""One CPU core: a tiny model that learns to say even words, in a run to which a fault may happen."""

import os
from pathlib import Path
from typing import Any

from benchmarks.kills.fault import NUM_STEPS, PROMPTS_PER_STEP
from benchmarks.kills.strike import with_fault
from controller.loops import grpo, grpo_async
from controller.runs import Loop
from generator.config import GeneratorConfig
from rl.configuration import configuration
from rl.deadlines import Deadlines
from rl.lora import LoRAConfig
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig


@configuration
class FaultyGRPOConfig(grpo.GRPOConfig):
    """`grpo`, with a fault if the environment says so."""

    def loop(self) -> Loop:
        return with_fault(grpo.train)


@configuration
class FaultyGRPOAsyncConfig(grpo_async.GRPOAsyncConfig):
    """`grpo_async`, with a fault if the environment says so."""

    def loop(self) -> Loop:
        return with_fault(grpo_async.train)


def recipe() -> grpo.GRPOConfig:
    """KILLS_MODEL is the model's directory; the other variables of that name are set by `Cell`."""
    deadlines = Deadlines(first_s=90, at_least_s=float(os.environ["KILLS_DEADLINE"]))
    ranks, replicas = int(os.environ["KILLS_RANKS"]), int(os.environ["KILLS_REPLICAS"])
    fields: dict[str, Any] = {
        "model": str(Path(os.environ["KILLS_MODEL"])),
        "lora": LoRAConfig(rank=8) if os.environ["KILLS_LORA"] == "1" else None,
        "env": EvenWords(),
        "trainer": TrainerConfig(
            compute_dtype="float32", data_parallel_shard=ranks, max_tokens_per_microbatch=512, deadlines=deadlines
        ),
        "generator": GeneratorConfig(
            dtype="float32", max_model_len=64, max_num_seqs=16, num_replicas=replicas, deadlines=deadlines
        ),
        "sampling": SamplingParams(max_tokens=8),
        "num_steps": NUM_STEPS,
        "prompts_per_step": PROMPTS_PER_STEP,
        "group_size": 4,
        "learning_rate": 3e-3,
        "num_eval": 8,
        "evaluate_every": 4,
        "checkpoint_every": 2,
    }
    if os.environ["KILLS_LOOP"] == "grpo":
        return FaultyGRPOConfig(**fields)
    return FaultyGRPOAsyncConfig(**fields, max_staleness=1)
