"""New weights for a generator at work: SmolLM2, 32 streams of requests that never pause, 20 pulls among them.

    python -m benchmarks.inflight_updates [--quick | --smoke] [--pulls N] [--threads N] [--dtype D]

Every pull has mode "inflight": requests continue under the new weights, and the keys and values that attention kept of
the old weights are computed again. A second round keeps them (`keep_prefix_cache`). Bars: no request is lost, and the
versions of a completion's tokens never decrease. Stated for each pull: the longest time that any stream waited for its
next token, which includes the recomputation for all streams, beside the same time without a pull.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.protocols import Generator
from rl.system.hardware import cpu_dtype, cpu_thread_env
from rl.types import Completion, SamplingParams

if TYPE_CHECKING:  # they load torch, Monarch and vLLM
    from controller.handles.generator_handle import GeneratorHandle, VersionRecords
    from controller.processes.mesh import Mesh

PROMPT_TOKENS = 48
MAX_TOKENS = 128
PAUSE_S = 0.5
"""Between the first tokens after a pull and the next push."""


@dataclass
class Round:
    """The outcome of one way of pulling."""

    completions: list[Completion] = field(default_factory=list[Completion])
    num_sent: int = 0
    stalls: list[float] = field(default_factory=list[float])
    """For each pull, the longest gap between two tokens of any stream during or right after the pull."""
    pulls: list[float] = field(default_factory=list[float])
    """Seconds of each pull, as its caller sees them."""
    undisturbed: list[float] = field(default_factory=list[float])
    """All gaps outside of pulls."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="4 pulls")
    options_parser.add_argument("--pulls", type=int, default=20)
    options_parser.add_argument("--threads", type=int, default=1)
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="default: what this CPU does fast")
    options = options_parser.parse_args()
    num_pulls = 1 if options.smoke else 4 if options.quick else options.pulls
    num_streams = 2 if options.smoke else 32
    with benchmark_model(smoke=options.smoke) as model:
        rounds = asyncio.run(measure(model, num_pulls, num_streams, options.threads, options.dtype))
    figures = {"streams": num_streams, "threads": options.threads, "dtype": options.dtype, **summary(rounds)}
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


def summary(rounds: Mapping[str, Round]) -> dict[str, object]:
    """The figures of both rounds."""
    figures: dict[str, object] = {}
    for name, result in rounds.items():
        versions = [completion.versions for completion in result.completions]
        figures |= {
            f"pulls_{name}": len(result.pulls),
            f"requests_{name}": len(versions),
            f"requests_of_several_versions_{name}": sum(len(set(of_request)) > 1 for of_request in versions),
            f"seconds_stall_median_{name}": statistics.median(result.stalls),
            f"seconds_stall_max_{name}": max(result.stalls),
            f"seconds_pull_median_{name}": statistics.median(result.pulls),
            f"seconds_between_tokens_median_{name}": statistics.median(result.undisturbed),
            f"seconds_between_tokens_max_{name}": max(result.undisturbed),
        }
    return figures


@dataclass(frozen=True, slots=True)
class Processes:
    """A generator, and a trainer that publishes weights for it."""

    trainer: "Mesh"
    mesh: "Mesh"
    generator: "GeneratorHandle"
    version_records: "VersionRecords"

    async def publish(self, version: int) -> None:
        """Publishes weights that differ a little from the last ones."""
        await self.trainer.call("step", [()])
        _, record = (await self.trainer.call("publish", [(version,)]))[0]
        self.version_records.add(record)

    async def gaps(self) -> list[tuple[float, float]]:
        """`TimedGenerator.gaps`."""
        return (await self.mesh.call("gaps", [()]))[0]


async def measure(model: Path, num_pulls: int, num_streams: int, threads: int, dtype: Any) -> dict[str, Round]:
    """One round that recomputes and one that keeps, by name."""
    rounds = {"recomputing": Round(), "keeping": Round()}
    vocabulary, version = vocab_size(model), 0
    async with processes(model, num_streams, threads, dtype) as running:
        for name, result in rounds.items():
            over = asyncio.Event()
            streams = asyncio.gather(
                *(stream(running.generator, index, vocabulary, over, result) for index in range(num_streams))
            )
            await asyncio.sleep(3 * PAUSE_S)
            times: list[tuple[float, float]] = []
            for _ in range(num_pulls):
                version += 1
                await running.publish(version)
                begin = time.monotonic()
                await running.generator.pull_model_state_dict(
                    version, mode="inflight", keep_prefix_cache=name == "keeping"
                )
                times.append((begin, time.monotonic()))
                # vLLM serves requests in turn, so every stream has gone on by the time that this one is answered.
                await running.generator.generate([version] * PROMPT_TOKENS, SamplingParams(max_tokens=1))
                await asyncio.sleep(PAUSE_S)
            over.set()
            await streams
            attribute(result, times, await running.gaps())
    return rounds


@asynccontextmanager
async def processes(model: Path, num_streams: int, threads: int, dtype: Any) -> AsyncGenerator[Processes]:
    """Starts and stops the processes. The generator has a place for every stream and for one more request."""
    import torch

    from benchmarks.generator_actors import TimedGenerator
    from benchmarks.weight_actors import TrainerRank
    from controller.handles.generator_handle import GeneratorHandle, VersionRecords
    from controller.handles.store import WeightStore
    from controller.processes.mesh import Mesh
    from generator.config import GeneratorConfig
    from generator.options import generator_env

    config = GeneratorConfig(
        model=model, dtype=dtype, max_model_len=256, max_num_seqs=num_streams + 1, num_threads=threads
    )
    env = cpu_thread_env(1)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        store = await WeightStore.launch(logs)
        arguments = model, getattr(torch, dtype), store.name
        trainer = await Mesh.spawn("trainer", TrainerRank, *arguments, num_ranks=1, env=env, log_dir=logs)
        mesh = await Mesh.spawn(
            *("generator", TimedGenerator, config, store.name), num_ranks=1, env=generator_env(config), log_dir=logs
        )
        try:
            version_records = VersionRecords()
            generator = GeneratorHandle(mesh, config, version_records)
            await generator.version()
            yield Processes(trainer, mesh, generator, version_records)
        finally:
            await asyncio.gather(store.stop(), trainer.stop(), mesh.stop())


async def stream(generator: Generator, index: int, vocabulary: int, over: asyncio.Event, result: Round) -> None:
    """Sends request after request until `over` is set; the last request is still answered."""
    turn = 0
    while not over.is_set():
        prompt = [(1000 + 97 * index + 7 * turn + j) % vocabulary for j in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=MAX_TOKENS - index % 16, seed=1000 * turn + index)
        result.num_sent += 1
        result.completions += await generator.generate(prompt, sampling)
        turn += 1


def attribute(result: Round, pulls: Sequence[tuple[float, float]], gaps: Sequence[tuple[float, float]]) -> None:
    """Sorts gaps between tokens (end, length) by the pull (begin, end) that they overlap, if any."""
    result.pulls = [end - begin for begin, end in pulls]
    result.stalls = [max(length for at, length in gaps if at - length <= end and at >= begin) for begin, end in pulls]
    result.undisturbed = [
        length
        for at, length in gaps
        if pulls[0][0] <= at <= pulls[-1][1] + PAUSE_S and all(at - length > end or at < begin for begin, end in pulls)
    ]


if __name__ == "__main__":
    main()
