"""`ownloop run` on pretended GPUs in several layouts: `python -m tests.gpu_pretended.whole_runs LAYOUT ...`.

The run's processes are Monarch's, and weights go through the GPUs' own memory; each generator pulls from all ranks of
the trainer. Prints one JSON object, and exits with 1 if the generators' log-probs are not the trainer's, a step is
missing, or weights took another way.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kills.cell import process_of
from controller.loops.grpo import GRPOConfig
from controller.runs.folder import read_metrics
from generator.config import GeneratorConfig
from rl.tiny_models import tiny_qwen3, tiny_qwen3_moe
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig

LIMIT = 0.05
"""Of the mean mismatch of log-probs, in bfloat16 and of a model this small."""
MIXTURE_LIMIT = 0.08
"""Of a mixture whose trainer chooses the experts anew."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How trainer and generator are laid out, and over what."""

    trainer: Mapping[str, Any]
    generator: Mapping[str, Any]
    mixture: bool = False
    loop: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the loop."""
    killed: str = ""
    """The log of a process that is killed after the first step."""
    limit: float = LIMIT
    """Of the mean mismatch of log-probs."""


LAYOUTS: Mapping[str, Layout] = {
    "colocated": Layout(
        trainer={"data_parallel_shard": 2},
        generator={"num_replicas": 2},
        mixture=True,
        loop={"placement": "colocated", "routes": "replay"},
    ),
    "fsdp2_tp2": Layout(trainer={"data_parallel_shard": 2}, generator={"tensor_parallel": 2}),
    "hsdp2x2_ep2_tp2": Layout(
        trainer={"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 2},
        generator={"tensor_parallel": 2},
        mixture=True,
        limit=MIXTURE_LIMIT,
    ),
    "fsdp2xtp2_2xtp2": Layout(
        trainer={"data_parallel_shard": 2, "tensor_parallel": 2}, generator={"tensor_parallel": 2, "num_replicas": 2}
    ),
    "pp2xfsdp2": Layout(trainer={"pipeline_parallel": 2, "data_parallel_shard": 2}, generator={}),
    "fsdp8": Layout(trainer={"data_parallel_shard": 8}, generator={}),
    "bitwise": Layout(
        trainer={"data_parallel_shard": 2},
        generator={"num_replicas": 2},
        loop={"numerics": "bitwise", "num_steps": 3},
        limit=0.0,
    ),
    "restart": Layout(
        trainer={"data_parallel_shard": 2},
        generator={},
        loop={"checkpoint_every": 1, "num_steps": 3},
        killed="trainer-1.log",
    ),
}


def recipe() -> GRPOConfig:
    """As recipes of GPUs are, with a random model of two layers that is to say even words."""
    layout = LAYOUTS[os.environ["LAYOUT"]]
    eager = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    if layout.generator.get("tensor_parallel"):
        eager["disable_custom_all_reduce"] = True
    fields: dict[str, Any] = {"num_steps": 2, **layout.loop}
    return GRPOConfig(
        model="model",
        env=EvenWords(),
        trainer=TrainerConfig(max_tokens_per_microbatch=512, **layout.trainer),
        generator=GeneratorConfig(max_model_len=64, max_num_seqs=16, engine_args=eager, **layout.generator),
        sampling=SamplingParams(max_tokens=8),
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_eval=16,
        **fields,
    )


def run(name: str) -> dict[str, Any]:
    """Runs one layout in a folder of its own. Every number is to be 0 but `mismatch`."""
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "num_kv_heads": 2}
        if layout.mixture:
            del shape["num_kv_heads"]
            tiny_qwen3_moe(Path(folder) / "model", moe_intermediate_size=64, **shape)
        else:
            tiny_qwen3(Path(folder) / "model", tied=False, **shape)
        command = [sys.executable, "-m", "controller.commands.cli", "run", __file__, "--runs", ".", "--name", "run"]
        env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}", "LAYOUT": name}
        process = subprocess.Popen(command, cwd=folder, env=env)
        of_run = Path(folder) / "run"
        if layout.killed:
            _kill_after_a_step(process, of_run, layout.killed)
        status = process.wait()
        rows = read_metrics(of_run / "metrics.jsonl") if (of_run / "metrics.jsonl").exists() else []
        logs = {path.stem: path.read_text(errors="replace") for path in (of_run / "logs").glob("*.log")}
    for name_of_log, log in logs.items() if status else ():
        print(f"--- {name_of_log}\n{log[-1500:]}", flush=True)
    steps = [row for row in rows if "loss" in row]
    mismatch = max((row["logprob_mismatch_mean"] for row in steps), default=1.0)
    asleep = [log for file, log in logs.items() if file.startswith("generator-")]
    return {
        "status": status,
        "steps_missing": int(layout.loop.get("num_steps", 2)) - len(steps),
        "mismatch": mismatch,
        "disagrees": int(mismatch > layout.limit),
        "other_ways": sum("carries the weights" in log for log in logs.values()),
        "never_slept": sum("sleep freed" not in log for log in asleep) if "placement" in layout.loop else 0,
    }


def _kill_after_a_step(process: subprocess.Popen[bytes], of_run: Path, log: str) -> None:
    metrics = of_run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and any("loss" in row for row in read_metrics(metrics))):
        time.sleep(0.1)
    if (pid := process_of(of_run / "logs" / log)) is not None:
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Runs the layouts that were named."""
    found = {name: run(name) for name in sys.argv[1:]}
    print(json.dumps(found))
    return int(any(value for each in found.values() for key, value in each.items() if key != "mismatch"))


if __name__ == "__main__":
    sys.exit(main())
