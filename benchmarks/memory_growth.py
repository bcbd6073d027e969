"""What grows in a long run: the memory and the descriptors of every process, and the trainer's peak.

    python -m benchmarks.memory_growth [--quick | --smoke] [--minutes N] [--steps N] [--part run | trainer]

`run` is `grpo_async` on a tiny random model for ten minutes. Every process is looked at every five seconds. Bars: its
resident memory grows by at most 1 MB a minute after the first two minutes, and its open descriptors in the last third
are no more than in the second one.

`trainer` is a trainer alone, in its own process, for 100 steps on batches as the default recipe samples them: 16
prompts of 50 to 60 tokens with 8 answers of 3 to 8 tokens each, so that no two steps have the same shapes. Bar: the
largest peak after step 20 is at most 2 % above the largest one before. Without options both parts run.
"""

import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from controller.commands.output import CapturedOutput
from controller.handles.trainer_handle import TrainerHandle
from controller.loops.grpo_async import GRPOAsyncConfig, train
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from generator.config import GeneratorConfig
from rl.system.hardware import cpu_dtype, keep_few_arenas
from rl.tiny_tasks import EvenWords
from rl.types import AdamParams, Datum, SamplingParams
from trainer.config import TrainerConfig

MEGABYTE = 1e6
Samples = dict[str, list[tuple[float, float, float]]]
"""Process -> (minutes, resident megabytes, open descriptors) of each look."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="20 seconds, and 12 steps of 4 prompts")
    options_parser.add_argument("--minutes", type=float, default=10, help="length of the run")
    options_parser.add_argument("--steps", type=int, default=100, help="steps of the trainer")
    options_parser.add_argument("--part", choices=("run", "trainer"), help="only this part")
    options = options_parser.parse_args()
    keep_few_arenas()  # as the command does
    minutes, steps, prompts = options.minutes, options.steps, 16
    if options.quick or options.smoke:
        minutes, steps, prompts = (0.05, 4, 2) if options.smoke else (1 / 3, 12, 4)
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    if options.part != "trainer":
        of_run = measure_run(minutes)
        bars += [
            Bar(name="megabytes_per_minute", value=max(slope for slope, _ in of_run.values()), limit=1),
            Bar(name="descriptors_leaked", value=max(leaked for _, leaked in of_run.values()), limit=0),
        ]
        figures |= {f"megabytes_per_minute_{name}": slope for name, (slope, _) in of_run.items()}
    if options.part != "run":
        with tempfile.TemporaryDirectory() as folder, benchmark_model(smoke=options.smoke) as model:
            peaks = asyncio.run(measure_trainer(model, Path(folder), steps, prompts))
        before = min(20, steps // 2)
        growth = max(peaks[before:]) / max(peaks[:before]) - 1
        bars.append(Bar(name="trainer_peak_growth", value=growth, limit=0.02))
        figures |= {"trainer_peak_megabytes": [round(peak / MEGABYTE) for peak in peaks]}
    print_result("memory_growth", bars, {"minutes": minutes, "steps": steps, **figures})


def measure_run(minutes: float) -> dict[str, tuple[float, float]]:
    """Process -> its megabytes per minute after the first fifth, and descriptors gained from the second third on."""
    samples: Samples = defaultdict(list)
    with CapturedOutput() as output, tempfile.TemporaryDirectory() as folder, benchmark_model(smoke=True) as model:
        run_folder = RunFolder(Path(folder) / "run", _tiny_recipe(model))
        output.move_to(run_folder.logs / "controller.log")
        asyncio.run(_run_and_look(run_folder, model, minutes, samples))
    results: dict[str, tuple[float, float]] = {}
    for name, looks in samples.items():
        late = [look for look in looks if look[0] >= minutes / 5]
        if len(late) < 3:  # a process that helped at the start
            continue
        minute, resident, descriptors = np.array(late).T
        thirds = np.array_split(descriptors, 3)
        results[name] = float(np.polyfit(minute, resident, 1)[0]), float(max(thirds[2]) - max(thirds[1]))
        print(f"{name:<24}{resident[0]:9.1f} MB {results[name][0]:+8.3f} MB/min {descriptors[-1]:6.0f} descriptors")
    return results


def _tiny_recipe(model: Path) -> GRPOAsyncConfig:
    """A recipe whose learning rate is so small that the task is never solved."""
    return GRPOAsyncConfig(
        model=str(model),
        env=EvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8),
        num_steps=1_000_000,
        prompts_per_step=4,
        group_size=4,
        max_staleness=2,
        learning_rate=1e-7,
        num_eval=16,
        evaluate_every=50,
        checkpoint_every=20,
    )


async def _run_and_look(folder: RunFolder, model: Path, minutes: float, samples: Samples) -> None:
    """Runs the loop for a number of minutes after its first step, and adds what each process held meanwhile."""
    with (folder.logs / "console.log").open("w") as log:
        loop = asyncio.create_task(train(_tiny_recipe(model), folder, Console(log)))
        while not folder.metrics_file.exists() or not any("grad_norm" in row for row in folder.metrics()):
            await asyncio.wait({loop}, timeout=0.5)
            if loop.done():
                loop.result()
        start = time.monotonic()
        while (now := (time.monotonic() - start) / 60) < minutes and not loop.done():
            for name, process in _processes(folder.logs).items():
                try:
                    look = now, process.memory_info().rss / MEGABYTE, float(process.num_fds())
                except psutil.NoSuchProcess:  # it has ended since it was listed
                    continue
                samples[name].append(look)
            await asyncio.wait({loop}, timeout=min(5, minutes * 60 / 20))
        loop.cancel()
        await asyncio.wait({loop})
        if not loop.cancelled():
            loop.result()


def _processes(logs: Path) -> dict[str, psutil.Process]:
    """This process and all below it, by the name of their log or of their program."""
    me = psutil.Process()
    found = {"controller": me}
    for process in me.children(recursive=True):
        try:
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            name = log.stem if log.parent == logs else process.name()
        except (OSError, psutil.NoSuchProcess):
            continue
        found[name if name not in found else f"{name} {process.pid}"] = process
    return found


async def measure_trainer(model: Path, folder: Path, steps: int, prompts: int) -> list[float]:
    """The peak of each step in bytes: of its forward and backward passes or of its update, whichever is larger."""
    config = TrainerConfig(model=model, compute_dtype=cpu_dtype(), num_threads=2, max_tokens_per_microbatch=2048)
    trainer = await TrainerHandle.launch(config, None, folder)
    random, vocabulary, peaks = np.random.default_rng(0), vocab_size(model), list[float]()
    try:
        for step in range(1, steps + 1):
            batch = [datum for _ in range(prompts) for datum in _group(random, vocabulary)]
            await trainer.forward_backward(batch, "importance_sampling")
            update = await trainer.optim_step(AdamParams(learning_rate=1e-6, grad_clip_norm=1.0), 1e-3)
            peaks.append(max(value for name, value in update.metrics.items() if name.startswith("memory_peak_bytes_")))
            print(f"step {step:4} {peaks[-1] / MEGABYTE:9.0f} MB", flush=True)
    finally:
        await trainer.stop()
    return peaks


def _group(random: np.random.Generator, vocabulary: int) -> list[Datum]:
    """Eight answers to one prompt."""
    prompt = random.integers(3, vocabulary, random.integers(50, 61))
    data: list[Datum] = []
    for _ in range(8):
        tokens = np.concatenate([prompt, random.integers(3, vocabulary, random.integers(3, 9))])
        scored = (np.arange(1, len(tokens)) >= len(prompt)).astype(np.float32)
        inputs = {"logprobs": -3 * scored, "advantages": np.float32(random.normal()) * scored, "weights": scored}
        data.append(Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], **inputs}))
    return data


if __name__ == "__main__":
    main()
