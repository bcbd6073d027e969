"""Tokens per second through the controller's handle, against vLLM's own offline `LLM.generate` on the same prompts.

    python -m benchmarks.generation_throughput [--quick] [--rounds N] [--threads N] [--dtype D]

32 concurrent requests of 128 new tokens each, SmolLM2, both with the same threads and dtype; the two take turns, each
alone with the machine's cores, in processes of their own. vLLM has its default settings but for the memory that it
takes: the length of the context and 1 GiB for keys and values. No prompt comes twice, so that no prefix cache helps.
Bar: the handle reaches 95 % of it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Bar, print_result
from rl.hardware import cpu_dtype

NUM_REQUESTS = 32
PROMPT_TOKENS = 48
MAX_MODEL_LEN = 256
WARM_UP_TOKENS = 8


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds measured, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default=cpu_dtype(), help="of both; by default what this processor computes fast")
    parser.add_argument("--quick", action="store_true", help="one round of 32 new tokens")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    max_tokens = 32 if options.quick else 128
    rates = asyncio.run(measure(options, max_tokens))
    handle, offline = (statistics.median(rates[name]) for name in ("handle", "offline"))
    controller = statistics.median(rates["controller"])
    print(f"handle  {handle:8.1f} tokens/s\noffline {offline:8.1f} tokens/s")
    print_result(
        "generation_throughput",
        [Bar(name="ratio_to_offline", value=handle / offline, limit=0.95, at_most=False)],
        {
            "tokens_per_s": handle,
            "tokens_per_s_offline": offline,
            "cores_busy_in_controller": controller,
            "rounds": len(rates["handle"]),
            "requests": NUM_REQUESTS,
            "new_tokens": max_tokens,
            "threads": options.threads,
            "dtype": options.dtype,
        },
    )


async def measure(options: argparse.Namespace, max_tokens: int) -> dict[str, list[float]]:
    """Tokens per second of each, and cores that this process keeps busy, in every round after a first short one."""
    # After the mesh, because what imports Monarch first configures it.
    from benchmarks.offline_actor import OfflineGenerator
    from controller.meshes.generator_handle import GeneratorHandle
    from controller.meshes.mesh import Mesh
    from controller.runs.models import resolve_model
    from generator.config import GeneratorConfig
    from rl.types import SamplingParams

    model = resolve_model("smollm2-135m-instruct")
    config = GeneratorConfig(
        model=model,
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        num_threads=options.threads,
    )
    env = {
        "OMP_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binds to cores that are not this process's
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    rates: dict[str, list[float]] = {"handle": [], "offline": [], "controller": []}
    with tempfile.TemporaryDirectory() as folder:
        generator = await GeneratorHandle.launch(config, Path(folder))
        arguments = (str(model), options.dtype, MAX_MODEL_LEN)
        offline = await Mesh.spawn("offline", OfflineGenerator, *arguments, num_ranks=1, env=env, log_dir=Path(folder))
        try:
            for turn in range(options.rounds + 1):
                num_new = max_tokens if turn else WARM_UP_TOKENS
                prompts = [
                    [1000 + (3203 * turn + 97 * i + j) % 40000 for j in range(PROMPT_TOKENS)]
                    for i in range(NUM_REQUESTS)
                ]
                sampling = SamplingParams(max_tokens=num_new, seed=turn)
                begin, begin_cpu = time.perf_counter(), time.process_time()
                groups = await asyncio.gather(*(generator.generate(prompt, sampling) for prompt in prompts))
                seconds = time.perf_counter() - begin
                rates["handle"].append(sum(len(sample.tokens) for group in groups for sample in group) / seconds)
                rates["controller"].append((time.process_time() - begin_cpu) / seconds)
                call = offline.rank(0).tokens_per_second.call_one(prompts, num_new, turn)
                rates["offline"].append(await offline.answer(call))
        finally:
            await asyncio.gather(generator.stop(), offline.stop())
    return {name: values[1:] for name, values in rates.items()}


if __name__ == "__main__":
    main()
