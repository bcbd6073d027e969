"""Trainer and generator on the same GPU: a few steps of GRPO with SmolLM2, split and colocated.

    python -m benchmarks.gpu.placement [--smoke]

Split on one GPU, both processes hold their memory all the time; colocated, they take turns. `mismatch` is the mean
difference of the log-probs in which trainer and generator saw the sampled tokens of the colocated run: weights that a
turn had lost would show. `held_out_difference` is that of the held-out rewards after the last step, over the width of
the wider interval: both runs have the same seed. `--smoke` runs one colocated step, on the CPU if there is no GPU.
"""

import asyncio
import io
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import Bar, parser, print_result
from configs import grpo_smollm2_cpu, grpo_smollm2_gpu
from controller.loops import grpo
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from rl.types import Placement

Rows = Sequence[Mapping[str, float]]


def recipe(placement: Placement, *, smoke: bool) -> GRPOConfig:
    """A short run of the recipe for this machine's device."""
    config = (grpo_smollm2_gpu if torch.cuda.is_available() else grpo_smollm2_cpu).recipe()
    return replace(
        config,
        placement=placement,
        num_steps=1 if smoke else 4,
        prompts_per_step=2 if smoke else 32,
        group_size=4 if smoke else 16,
        num_eval=2 if smoke else 32,
        sampling=replace(config.sampling, max_tokens=4 if smoke else config.sampling.max_tokens),
        checkpoint_every=0,
    )


def run(config: GRPOConfig, path: Path) -> tuple[Rows, Mapping[str, float]]:
    """The rows of its optimizer steps, and that of its last evaluation."""
    folder = RunFolder(path, config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    rows = folder.metrics()
    return [row for row in rows if "grad_norm" in row], [row for row in rows if "eval_reward" in row][-1]


def main() -> None:
    """Runs the comparison and prints the result."""
    options = parser(__doc__, quick="as without").parse_args()
    seconds: dict[str, float] = {}
    rows: Rows = []
    evaluations: dict[str, Mapping[str, float]] = {}
    placements: tuple[Placement, ...] = ("colocated",) if options.smoke else ("split", "colocated")
    with tempfile.TemporaryDirectory() as folder:
        for placement in placements:
            rows, evaluations[placement] = run(recipe(placement, smoke=options.smoke), Path(folder) / placement)
            seconds[placement] = statistics.median(row["seconds_step"] for row in rows[-3:])
            held_out = evaluations[placement]["eval_reward"]
            print(f"{placement}: {seconds[placement]:.2f} s a step, held-out reward {held_out:.3f}", flush=True)
    rewards = [row["eval_reward"] for row in evaluations.values()]
    width = max(row["eval_reward_high"] - row["eval_reward_low"] for row in evaluations.values())
    difference = max(rewards) - min(rewards)
    print_result(
        "gpu_placement",
        [
            Bar(name="mismatch", value=max(row["logprob_mismatch_mean"] for row in rows), limit=0.05),
            Bar(name="held_out_difference", value=difference / width if difference else 0.0, limit=1.0),
        ],
        {f"seconds_{placement}": value for placement, value in seconds.items()}
        | {f"held_out_{placement}": row["eval_reward"] for placement, row in evaluations.items()},
    )


if __name__ == "__main__":
    main()
