"""What a weight update costs: SmolLM2's 272 tensors (269 MB in bfloat16) from one trainer rank to one generator rank.

    python -m benchmarks.weight_sync [--quick | --smoke] [--repeats N] [--threads N] [--dtype DTYPE]

An update is a push and a pull: it begins with float32 master weights in the trainer's process and ends when vLLM, in
the generator's process, would sample from the new weights. Its references are measured in the same rounds: one plain
copy of the same bytes, and TorchStore's own `put_state_dict` and `get_state_dict` over its default transport.

vLLM multiplies with packed weights where the CPU's oneDNN supports the dtype (float32 everywhere, bfloat16 from AVX-512
on). A pull packs them there, and copies them elsewhere. Bars: an update takes at most 4 times as long as a copy with
plain weights and 6 times with packed ones, and a tenth of TorchStore's time.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.harness import Bar, benchmark_model, parser, print_result

if TYPE_CHECKING:  # they load torch, Monarch and vLLM
    from controller.handles.generator_handle import GeneratorHandle, VersionRecords
    from controller.handles.store import WeightStore
    from controller.processes.mesh import Mesh

MAX_COPIES = {"plain": 4, "packed": 6}
"""Most copies' time that an update may take, by the form of the weights that vLLM multiplies with."""
Seconds = Mapping[str, Sequence[float]]
"""By the part of a round, its time in each round."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds")
    options_parser.add_argument("--repeats", type=int, default=9, help="rounds measured, after a warm-up round")
    options_parser.add_argument("--threads", type=int, default=2, help="of the trainer's rank and of the generator's")
    options_parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the generator's")
    options = options_parser.parse_args()
    repeats = 1 if options.smoke else 3 if options.quick else options.repeats
    with benchmark_model(smoke=options.smoke) as model:
        measured = asyncio.run(measure(model, repeats, options.threads, options.dtype))

    figures = show(measured.seconds)
    print_result(
        "weight_sync",
        [
            Bar(name="ratio_to_copy", value=figures["update"] / figures["copy"], limit=MAX_COPIES[measured.form]),
            Bar(
                name="speedup_over_torchstore", value=figures["torchstore"] / figures["update"], limit=10, at_most=False
            ),
        ],
        {
            "rounds": repeats,
            "threads": options.threads,
            "dtype": options.dtype,
            "generator_weights": measured.form,
            "megabytes": measured.num_bytes / 1e6,
            **{f"seconds_{name}": value for name, value in figures.items()},
            "ratio_to_copy_fastest": min(measured.seconds["update"]) / min(measured.seconds["copy"]),
        },
    )


def show(seconds: Seconds) -> dict[str, float]:
    """Prints and returns the median of each part."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<28}{1e3 * value:9.1f} ms   fastest {1e3 * min(seconds[name]):9.1f} ms", flush=True)
    return medians


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds but the first."""

    seconds: Seconds
    num_bytes: int
    """Size of an update."""
    form: Literal["plain", "packed"]
    """The form of the weights that vLLM multiplies with."""


async def measure(model: Path, repeats: int, threads: int, dtype: str) -> Measured:
    """Measures updates and both references, `repeats` times after a warm-up round."""
    import torch

    from benchmarks.weight_actors import StateDictReader
    from controller.processes.mesh import Mesh
    from trainer.config import TrainerConfig, trainer_env

    seconds: dict[str, list[float]] = defaultdict(list)
    async with meshes(model, dtype, threads) as processes:
        arguments = model, getattr(torch, dtype), processes.store.name
        env = trainer_env(TrainerConfig(num_threads=threads))
        reader = await Mesh.spawn("reader", StateDictReader, *arguments, num_ranks=1, env=env, log_dir=processes.logs)
        try:
            for version in range(1, repeats + 2):
                await processes.round(version, seconds)
                pids, key = (*processes.trainer.pids, *reader.pids, *processes.store.mesh.pids), f"benchmark/{version}"
                cpu = cpu_seconds(pids)
                put = (await processes.trainer.call("put", [(key,)]))[0]
                seconds["torchstore"].append(put + (await reader.call("get", [(key,)]))[0])
                seconds["torchstore_cpu"].append(cpu_seconds(pids) - cpu)
        finally:
            await reader.stop()
        return Measured(
            seconds={name: values[1:] for name, values in seconds.items()},
            num_bytes=await processes.num_bytes(),
            form="packed" if await processes.packs_weights() else "plain",
        )


@dataclass(frozen=True, slots=True)
class Meshes:
    """The processes of an update."""

    store: "WeightStore"
    trainer: "Mesh"
    generator: "GeneratorHandle"
    version_records: "VersionRecords"
    logs: Path

    async def num_bytes(self) -> int:
        """Size of the published weights."""
        return (await self.trainer.call("num_bytes", [()]))[0]

    async def packs_weights(self) -> bool:
        """`PackingGenerator.packs_weights`."""
        return (await self.generator.mesh.call("packs_weights", [()]))[0]

    async def round(self, version: int, seconds: dict[str, list[float]]) -> None:
        """Does one copy and one update, and appends their times to `seconds`."""
        seconds["copy"].append((await self.trainer.call("copy", [()]))[0])
        await self.trainer.call("step", [()] * self.trainer.num_ranks)
        pids = (os.getpid(), *self.trainer.pids, *self.generator.mesh.pids, *self.store.mesh.pids)
        cpu, begin = cpu_seconds(pids), time.perf_counter()
        pushes = await self.trainer.call("publish", [(version,)] * self.trainer.num_ranks)
        seconds["push"].append(max(took for took, _ in pushes))
        self.version_records.add(next(record for _, record in pushes if record is not None))
        pushed = time.perf_counter()
        await self.generator.pull_model_state_dict(version)
        seconds["pull"].append(time.perf_counter() - pushed)
        seconds["update"].append(time.perf_counter() - begin)
        seconds["update_cpu"].append(cpu_seconds(pids) - cpu)


@asynccontextmanager
async def meshes(
    model: Path, dtype: str, threads: int, *, num_ranks: int = 1, tensor_parallel: int = 1
) -> AsyncGenerator[Meshes]:
    """Starts a trainer of `num_ranks` shards and a generator; each of their ranks has `threads` threads."""
    import torch

    from benchmarks.generator_actors import PackingGenerator
    from benchmarks.weight_actors import TrainerRank
    from controller.handles.generator_handle import GeneratorHandle, VersionRecords
    from controller.handles.store import WeightStore
    from controller.processes.mesh import Mesh
    from generator.config import GeneratorConfig
    from generator.options import generator_env
    from trainer.config import TrainerConfig, trainer_env

    config = GeneratorConfig(
        model=model,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=256,
        max_num_seqs=4,
        num_threads=threads,
        tensor_parallel=tensor_parallel,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = await WeightStore.launch(logs := Path(folder))
        arguments = model, getattr(torch, dtype), store.name
        env = trainer_env(TrainerConfig(num_threads=threads))
        trainer = await Mesh.spawn("trainer", TrainerRank, *arguments, num_ranks=num_ranks, env=env, log_dir=logs)
        mesh = await Mesh.spawn(
            *("generator", PackingGenerator, config, store.name),
            num_ranks=tensor_parallel,
            env=generator_env(config),
            log_dir=logs,
        )
        generator = GeneratorHandle(mesh, config, version_records := VersionRecords())
        try:
            await mesh.call("version", [()] * mesh.num_ranks)
            yield Meshes(store, trainer, generator, version_records, logs)
        finally:
            await asyncio.gather(store.stop(), trainer.stop(), generator.stop())


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that these processes have used so far, to 10 ms."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for user, system in ((f[11], f[12]) for f in fields)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
