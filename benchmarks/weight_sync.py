"""What a weight update costs: SmolLM2's 272 tensors (269 MB in bfloat16) from one trainer rank to one generator rank.

    python -m benchmarks.weight_sync [--quick] [--repeats N] [--threads N]

An update is a push and a pull: from float32 masters in the trainer's process until vLLM, in the generator's process,
would sample from the new weights. Its references are measured in the same rounds: one plain copy of those bytes, and
TorchStore's own `put_state_dict` and `get_state_dict` over its default transport. Bars: an update takes at most 4
copies, and a tenth of TorchStore's time.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Bar, print_result

DTYPE = "bfloat16"


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="rounds measured, after one that is not")
    parser.add_argument("--threads", type=int, default=2, help="threads of the trainer's and of the generator's rank")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    options = parser.parse_args()
    seconds, num_bytes = asyncio.run(measure(3 if options.quick else options.repeats, options.threads))

    figures = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in figures.items():
        print(f"{name:<28}{1e3 * value:9.1f} ms   fastest {1e3 * min(seconds[name]):9.1f} ms")
    print_result(
        "weight_sync",
        [
            Bar(name="ratio_to_copy", value=figures["update"] / figures["copy"], limit=4),
            Bar(
                name="speedup_over_torchstore", value=figures["torchstore"] / figures["update"], limit=10, at_most=False
            ),
        ],
        {
            "rounds": len(seconds["update"]),
            "threads": options.threads,
            "megabytes": num_bytes / 1e6,
            **{f"seconds_{name}": value for name, value in figures.items()},
            "ratio_to_copy_fastest": min(seconds["update"]) / min(seconds["copy"]),
        },
    )


async def measure(repeats: int, threads: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each part in every round after a first that is left out, and the bytes of an update."""
    import torch

    from benchmarks.weight_actors import StateDictReader, TrainerRank
    from controller.generator_handle import GeneratorHandle
    from controller.mesh import Mesh
    from controller.models import resolve_model
    from controller.store import WeightStore
    from generator.config import GeneratorConfig

    model = resolve_model("smollm2-135m-instruct")
    env, arguments = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}, (model, getattr(torch, DTYPE))
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        store = await WeightStore.launch(logs)
        trainer = await Mesh.spawn("trainer", TrainerRank, *arguments, num_ranks=1, env=env, log_dir=logs)
        reader = await Mesh.spawn("reader", StateDictReader, *arguments, num_ranks=1, env=env, log_dir=logs)
        config = GeneratorConfig(model=model, dtype=DTYPE, max_model_len=256, max_num_seqs=4, num_threads=threads)
        generator = await GeneratorHandle.launch(config, logs)
        try:
            num_bytes = await trainer.answer(trainer.rank(0).num_bytes.call_one())
            for version in range(1, repeats + 2):
                seconds["copy"].append(await trainer.answer(trainer.rank(0).copy.call_one()))
                await trainer.answer(trainer.rank(0).step.call_one())
                pids = (os.getpid(), *trainer.pids, *generator.mesh.pids, *store.mesh.pids)
                cpu, begin = cpu_seconds(pids), time.perf_counter()
                seconds["push"].append(await trainer.answer(trainer.rank(0).publish.call_one(version)))
                pushed = time.perf_counter()
                await generator.pull_model_state_dict(version)
                seconds["pull"].append(time.perf_counter() - pushed)
                seconds["update"].append(time.perf_counter() - begin)
                seconds["update_cpu"].append(cpu_seconds(pids) - cpu)

                pids, key = (*trainer.pids, *reader.pids, *store.mesh.pids), f"benchmark/{version}"
                cpu = cpu_seconds(pids)
                put = await trainer.answer(trainer.rank(0).put.call_one(key))
                seconds["torchstore"].append(put + await reader.answer(reader.rank(0).get.call_one(key)))
                seconds["torchstore_cpu"].append(cpu_seconds(pids) - cpu)
        finally:
            await asyncio.gather(store.stop(), trainer.stop(), reader.stop(), generator.stop())
    return {name: values[1:] for name, values in seconds.items()}, num_bytes


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that these processes have used, to 10 ms."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for user, system in ((f[11], f[12]) for f in fields)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
