"""Tokens per second through the controller's handle, against vLLM's own offline `LLM.generate` on the same prompts.

    python -m benchmarks.generation_throughput [--quick | --smoke] [--rounds N] [--threads N] [--dtype D]

32 concurrent requests of 128 new tokens each from SmolLM2, with the same threads and dtype on both sides. The two sides
live in processes of their own and take turns, so that each has the machine's cores to itself; who begins alternates
between rounds. vLLM has its default settings, except for its memory: the length of the context and 1 GiB for keys and
values. No prompt comes twice, so that no prefix cache helps. Bar: the handle reaches 95 % of vLLM's rate, as the median
of the rounds' ratios.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.system.hardware import cpu_dtype, cpu_thread_env

PROMPT_TOKENS = 48
MAX_MODEL_LEN = 256
WARM_UP_TOKENS = 8
Side = Callable[[list[list[int]], int, int], Awaitable[float]]
"""Prompts, new tokens of each and a seed in; tokens per second out."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds of 32 new tokens")
    options_parser.add_argument("--rounds", type=int, default=5, help="rounds measured, after a short warm-up round")
    options_parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="of both sides; default: what this CPU does fast")
    options = options_parser.parse_args()
    requests = 2 if options.smoke else 32
    rounds, max_tokens = (1, 4) if options.smoke else (3, 32) if options.quick else (options.rounds, 128)
    with benchmark_model(smoke=options.smoke) as model:
        rates, controller = asyncio.run(measure(model, options, requests, rounds, max_tokens))
    ratios = [ours / theirs for ours, theirs in zip(rates["handle"], rates["offline"], strict=True)]
    medians = {side: statistics.median(values) for side, values in rates.items()}
    for side, rate in medians.items():
        print(f"{side:<8}{rate:9.1f} tokens/s")
    print_result(
        "generation_throughput",
        [Bar(name="ratio_to_offline", value=statistics.median(ratios), limit=0.95, at_most=False)],
        {
            "tokens_per_s": medians["handle"],
            "tokens_per_s_offline": medians["offline"],
            "ratios": ratios,
            "cores_busy_in_controller": statistics.median(controller),
            "rounds": rounds,
            "requests": requests,
            "new_tokens": max_tokens,
            "threads": options.threads,
            "dtype": options.dtype,
        },
    )


async def measure(
    model: Path, options: argparse.Namespace, requests: int, rounds: int, max_tokens: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Tokens per second of each side, and cores that this process kept busy for the handle, in every round."""
    rates: dict[str, list[float]] = {"handle": [], "offline": []}
    controller: list[float] = []
    vocabulary = vocab_size(model)
    async with sides(model, options, requests) as measured:
        for turn in range(rounds + 1):
            num_new = max_tokens if turn else WARM_UP_TOKENS
            prompts = [
                [(1000 + 3203 * turn + 97 * i + j) % min(vocabulary, 40000) for j in range(PROMPT_TOKENS)]
                for i in range(requests)
            ]
            for side in rates if turn % 2 else reversed(rates):
                begin, begin_cpu = time.perf_counter(), time.process_time()
                rate = await measured[side](prompts, num_new, turn)
                if turn:
                    rates[side].append(rate)
                    if side == "handle":
                        controller.append((time.process_time() - begin_cpu) / (time.perf_counter() - begin))
    return rates, controller


@asynccontextmanager
async def sides(model: Path, options: argparse.Namespace, requests: int) -> AsyncGenerator[dict[str, Side]]:
    """The processes of both sides, and what has each of them sample."""
    # Here, because a module that imports Monarch also configures it, for this process and its children.
    from benchmarks.offline_actor import OfflineGenerator
    from controller.handles.generator_handle import GeneratorHandle
    from controller.processes.mesh import Mesh
    from generator.config import GeneratorConfig
    from rl.types import SamplingParams

    config = GeneratorConfig(
        model=model,
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=requests,
        num_threads=options.threads,
    )
    env = {
        **cpu_thread_env(options.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binds to cores that this process may not use
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        handle = await GeneratorHandle.launch(config, Path(folder))
        arguments = (str(model), options.dtype, MAX_MODEL_LEN)
        mesh = await Mesh.spawn("offline", OfflineGenerator, *arguments, num_ranks=1, env=env, log_dir=Path(folder))

        async def through_handle(prompts: list[list[int]], max_tokens: int, seed: int) -> float:
            sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
            begin = time.perf_counter()
            groups = await asyncio.gather(*(handle.generate(prompt, sampling) for prompt in prompts))
            num_tokens = sum(len(sample.tokens) for group in groups for sample in group)
            return num_tokens / (time.perf_counter() - begin)

        async def offline(prompts: list[list[int]], max_tokens: int, seed: int) -> float:
            return (await mesh.call("tokens_per_second", [(prompts, max_tokens, seed)]))[0]

        try:
            yield {"handle": through_handle, "offline": offline}
        finally:
            await asyncio.gather(handle.stop(), mesh.stop())


if __name__ == "__main__":
    main()
