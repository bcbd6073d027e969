"""New weights for a generator at work: SmolLM2, 32 streams of requests that never pause, 20 pulls among them.

    python -m benchmarks.inflight_updates [--quick] [--pulls N] [--threads N] [--dtype D]

Every pull has mode "inflight": requests go on under the new weights, and what attention kept of the old ones is
computed again. A second round keeps it (`keep_prefix_cache`). Bars: no request is lost, and the versions of a
completion's tokens never decrease. Stated for each pull: the longest time that any stream waited for its next token,
which includes the other streams' recomputation, beside the same without a pull.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, print_result
from rl.hardware import cpu_dtype
from rl.protocols import Generator
from rl.types import Completion, SamplingParams

NUM_STREAMS = 32
PROMPT_TOKENS = 48
MAX_TOKENS = 128
PAUSE_S = 0.5  # between the first tokens after a pull and the next push


@dataclass
class Round:
    """What one way of pulling gave."""

    completions: list[Completion] = field(default_factory=list[Completion])
    num_sent: int = 0
    stalls: list[float] = field(default_factory=list[float])
    """Per pull: the longest gap between two tokens of a stream that ends while or soon after the pull runs."""
    pulls: list[float] = field(default_factory=list[float])
    """Seconds of each pull, as its caller sees it."""
    undisturbed: list[float] = field(default_factory=list[float])
    """All gaps outside of pulls."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default=cpu_dtype(), help="by default what this processor computes fast")
    parser.add_argument("--quick", action="store_true", help="4 pulls")
    options = parser.parse_args()
    rounds = asyncio.run(measure(4 if options.quick else options.pulls, options.threads, options.dtype))
    figures: dict[str, object] = {"streams": NUM_STREAMS, "threads": options.threads, "dtype": options.dtype}
    for name, result in rounds.items():
        spans = [completion.versions for completion in result.completions]
        figures |= {
            f"pulls_{name}": len(result.pulls),
            f"requests_{name}": len(spans),
            f"requests_of_several_versions_{name}": sum(len(set(versions)) > 1 for versions in spans),
            f"seconds_stall_median_{name}": statistics.median(result.stalls),
            f"seconds_stall_max_{name}": max(result.stalls),
            f"seconds_pull_median_{name}": statistics.median(result.pulls),
            f"seconds_between_tokens_median_{name}": statistics.median(result.undisturbed),
            f"seconds_between_tokens_max_{name}": max(result.undisturbed),
        }
    for name, value in figures.items():
        print(f"{name:<44}{value:10.3f}" if isinstance(value, float) else f"{name:<44}{value!s:>10}")
    every = list(rounds.values())
    lost = sum(result.num_sent - len(result.completions) for result in every)
    decreasing = sum(list(c.versions) != sorted(c.versions) for result in every for c in result.completions)
    print_result(
        "inflight_updates",
        [Bar(name="requests_lost", value=lost, limit=0), Bar(name="decreasing_versions", value=decreasing, limit=0)],
        figures,
    )


async def measure(num_pulls: int, threads: int, dtype: Any) -> dict[str, Round]:
    """One round that recomputes and one that keeps, with a generator and a publisher of their own."""
    import torch

    from benchmarks.timed_generator import TimedGenerator
    from benchmarks.weight_actors import TrainerRank
    from controller.meshes.generator_handle import GeneratorHandle
    from controller.meshes.mesh import Mesh
    from controller.meshes.store import WeightStore
    from controller.meshes.version_records import VersionRecords
    from controller.runs.models import resolve_model
    from generator.config import GeneratorConfig
    from generator.options import generator_env

    model = resolve_model("smollm2-135m-instruct")
    config = GeneratorConfig(
        model=model, dtype=dtype, max_model_len=256, max_num_seqs=NUM_STREAMS + 1, num_threads=threads
    )
    env, arguments = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, (model, getattr(torch, dtype))
    rounds = {"recomputing": Round(), "keeping": Round()}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        store = await WeightStore.launch(logs)
        trainer = await Mesh.spawn("trainer", TrainerRank, *arguments, num_ranks=1, env=env, log_dir=logs)
        mesh = await Mesh.spawn(
            "generator", TimedGenerator, config, num_ranks=1, env=generator_env(config), log_dir=logs
        )
        try:
            version_records = VersionRecords()
            generator = GeneratorHandle(mesh, config, version_records)
            await generator.version()
            version = 0
            for name, result in rounds.items():
                streaming = asyncio.Event()
                streams = asyncio.gather(*(stream(generator, index, streaming, result) for index in range(NUM_STREAMS)))
                await asyncio.sleep(3 * PAUSE_S)
                times: list[tuple[float, float]] = []
                for _ in range(num_pulls):
                    version += 1
                    await trainer.answer(trainer.rank(0).step.call_one())
                    _, record = await trainer.answer(trainer.rank(0).publish.call_one(version))
                    version_records.add(record)
                    begin = time.monotonic()
                    await generator.pull_model_state_dict(version, mode="inflight", keep_prefix_cache=name == "keeping")
                    times.append((begin, time.monotonic()))
                    # A place is kept for it, and its turn comes after theirs: all have gone on when it is answered.
                    await generator.generate([version] * PROMPT_TOKENS, SamplingParams(max_tokens=1))
                    await asyncio.sleep(PAUSE_S)
                streaming.set()
                await streams
                attribute(result, times, await mesh.answer(mesh.rank(0).gaps.call_one()))
        finally:
            await asyncio.gather(store.stop(), trainer.stop(), mesh.stop())
    return rounds


async def stream(generator: Generator, index: int, over: asyncio.Event, result: Round) -> None:
    """Request after request until `over`; the one that is running then is still answered."""
    turn = 0
    while not over.is_set():
        prompt = [1000 + 97 * index + 7 * turn + j for j in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=MAX_TOKENS - index % 16, seed=1000 * turn + index)
        result.num_sent += 1
        result.completions += await generator.generate(prompt, sampling)
        turn += 1


def attribute(result: Round, pulls: list[tuple[float, float]], gaps: list[tuple[float, float]]) -> None:
    """Sorts gaps between tokens (end, length) by the pull (begin, end) that they overlap, if any."""
    result.pulls = [end - begin for begin, end in pulls]
    result.stalls = [max(length for at, length in gaps if at - length <= end and at >= begin) for begin, end in pulls]
    result.undisturbed = [
        length
        for at, length in gaps
        if pulls[0][0] <= at <= pulls[-1][1] and all(at - length > end or at < begin for begin, end in pulls)
    ]


if __name__ == "__main__":
    main()
