"""Trainer and generator on the same GPU: a few steps of GRPO with SmolLM2, split and colocated.

    python -m benchmarks.gpu.placement [--smoke]

Split on one GPU, both processes hold their memory all the time; colocated, they take turns. `mismatch` is the mean
difference of the log-probs in which trainer and generator saw the sampled tokens of the colocated run: weights that a
turn had lost would show. `--smoke` runs one colocated step, on the CPU if there is no GPU.
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


def run(config: GRPOConfig, path: Path) -> Rows:
    """The rows of its optimizer steps."""
    folder = RunFolder(path, config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    return [row for row in folder.metrics() if "grad_norm" in row]


def main() -> None:
    """Runs the comparison and prints the result."""
    options = parser(__doc__, quick="as without").parse_args()
    seconds: dict[str, float] = {}
    rows: Rows = []
    placements: tuple[Placement, ...] = ("colocated",) if options.smoke else ("split", "colocated")
    with tempfile.TemporaryDirectory() as folder:
        for placement in placements:
            rows = run(recipe(placement, smoke=options.smoke), Path(folder) / placement)
            seconds[placement] = statistics.median(row["seconds_step"] for row in rows[-3:])
            print(f"{placement}: {seconds[placement]:.2f} s a step", flush=True)
    print_result(
        "gpu_placement",
        [Bar(name="mismatch", value=max(row["logprob_mismatch_mean"] for row in rows), limit=0.05)],
        {f"seconds_{placement}": value for placement, value in seconds.items()},
    )


if __name__ == "__main__":
    main()
