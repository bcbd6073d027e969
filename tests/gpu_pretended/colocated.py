"""`ownloop run` on two pretended GPUs: two ranks under FSDP2 and two generators take turns with their memory.

    python -m tests.gpu_pretended.colocated

The run's processes are Monarch's. In each turn the generators sleep, or the trainer's tensors are in pinned memory of
the host. Weights go through the GPUs' own memory, and each generator pulls from both ranks. The model is a mixture, and
the trainer replays the generators' choices of experts. Prints one JSON object, and exits with 1 if the generators'
log-probs are not the trainer's, or weights took another way.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from controller.loops.grpo import GRPOConfig
from controller.runs.folder import read_metrics
from generator.config import GeneratorConfig
from rl.tiny_models import tiny_qwen3_moe
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig

LIMIT = 0.05
"""Of the mean mismatch of log-probs, in bfloat16 and of a model this small."""
ROOT = Path(__file__).parents[2]


def recipe() -> GRPOConfig:
    """As recipes of GPUs are, with a random mixture of two layers that is to say even words."""
    return GRPOConfig(
        model="model",
        env=EvenWords(),
        trainer=TrainerConfig(data_parallel_shard=2, max_tokens_per_microbatch=512),
        generator=GeneratorConfig(
            num_replicas=2,
            max_model_len=64,
            max_num_seqs=16,
            engine_args={"enforce_eager": True, "gpu_memory_utilization": 0.3},
        ),
        placement="colocated",
        routes="replay",
        sampling=SamplingParams(max_tokens=8),
        num_steps=2,
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_eval=16,
    )


def main() -> int:
    """Runs it in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen3_moe(Path(folder) / "model", hidden_size=128, head_dim=64, moe_intermediate_size=64)
        command = [sys.executable, "-m", "controller.commands.cli", "run", __file__, "--runs", ".", "--name", "run"]
        env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}"}
        status = subprocess.run(command, cwd=folder, env=env, check=False).returncode
        run = Path(folder) / "run"
        rows = read_metrics(run / "metrics.jsonl")
        logs = {path.stem: path.read_text(errors="replace") for path in (run / "logs").glob("*.log")}
    steps = [row for row in rows if "loss" in row]
    found = {
        "status": status,
        "steps_missing": recipe().num_steps - len(steps),
        "mismatch": max((row["logprob_mismatch_mean"] for row in steps), default=1.0),
        "never_slept": sum("sleep freed" not in logs.get(f"generator-{replica}-0", "") for replica in range(2)),
        "other_ways": sum("carries the weights" in log for log in logs.values()),
    }
    print(json.dumps(found))
    return int(not all(value <= (LIMIT if value % 1 else 0) for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
