"""Tokens per second through the controller's handle, against vLLM's own offline `LLM.generate` on the same prompts.

    python -m benchmarks.generation_throughput [--quick | --smoke] [--short] [--rounds N] [--threads N] [--dtype D]

32 concurrent requests of 128 new tokens each from SmolLM2, with the same threads and dtype on both sides. The two sides
live in processes of their own and take turns, so that each has the machine's cores to itself; who begins alternates
between rounds. vLLM has its default settings, except for its memory and its places: the length of the context, 1 GiB
for keys and values, and a place for each sample. No prompt comes twice, so that no prefix cache helps. Bar: the handle
reaches 95 % of vLLM's rate, as the median of the rounds' ratios.

With `--short`, 16 answers of 4 tokens to each of 64 prompts come from a model so small that the host's work is all
there is. Bar: the handle takes at most 1.15 times as long. It also returns log-probs, for which vLLM is not asked.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.system.hardware import cpu_dtype, cpu_thread_env

PROMPT_TOKENS = 48
MAX_MODEL_LEN = 256
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What a round samples."""

    prompts: int
    answers: int
    """Of each prompt."""
    max_tokens: int


Side = Callable[[list[list[int]], int, int], Awaitable[float]]
"""Prompts, new tokens of each and a seed in; tokens per second out."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds of 32 new tokens")
    options_parser.add_argument("--short", action="store_true", help="1,024 samples of 4 tokens from a tiny model")
    options_parser.add_argument("--rounds", type=int, default=5, help="rounds measured, after a short warm-up round")
    options_parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="of both sides; default: what this CPU does fast")
    options = options_parser.parse_args()
    rounds, max_tokens = (1, 4) if options.smoke else (3, 32) if options.quick else (options.rounds, 128)
    work = Work(2 if options.smoke else 32, 1, max_tokens)
    if options.short:
        work = Work(work.prompts * 2, 16, 4)
    with benchmark_model(smoke=options.smoke or options.short) as model:
        rates, controller = asyncio.run(measure(model, options, work, rounds))
    ratios = [ours / theirs for ours, theirs in zip(rates["handle"], rates["offline"], strict=True)]
    medians = {side: statistics.median(values) for side, values in rates.items()}
    for side, rate in medians.items():
        print(f"{side:<8}{rate:9.1f} tokens/s")
    print_result(
        "generation_throughput",
        [
            Bar(
                name="ratio_to_offline",
                value=statistics.median(ratios),
                limit=1 / 1.15 if options.short else 0.95,
                at_most=False,
            )
        ],
        {
            "tokens_per_s": medians["handle"],
            "tokens_per_s_offline": medians["offline"],
            "ratios": ratios,
            "cores_busy_in_controller": statistics.median(controller),
            "rounds": rounds,
            "requests": work.prompts,
            "answers": work.answers,
            "new_tokens": work.max_tokens,
            "threads": options.threads,
            "dtype": options.dtype,
        },
    )


async def measure(
    model: Path, options: argparse.Namespace, work: Work, rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Tokens per second of each side, and cores that this process kept busy for the handle, in every round."""
    rates: dict[str, list[float]] = {"handle": [], "offline": []}
    controller: list[float] = []
    vocabulary = vocab_size(model)
    async with sides(model, options, work) as measured:
        for turn in range(rounds + 1):
            num_new = work.max_tokens if turn else WARM_UP_TOKENS
            prompts = [
                [(1000 + 3203 * turn + 97 * i + j) % min(vocabulary, 40000) for j in range(PROMPT_TOKENS)]
                for i in range(work.prompts)
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
async def sides(model: Path, options: argparse.Namespace, work: Work) -> AsyncGenerator[dict[str, Side]]:
    """The processes of both sides, and what has each of them sample."""
    # Here, because a module that imports Monarch also configures it, for this process and its children.
    from benchmarks.offline_actor import OfflineGenerator
    from controller.handles.generator_handle import GeneratorHandle
    from controller.processes.mesh import Mesh
    from generator.config import GeneratorConfig
    from rl.system.hardware import sees_gpu
    from rl.types import SamplingParams

    config = GeneratorConfig(
        model=model,
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=work.prompts * work.answers,
        num_threads=options.threads,
        engine_args={"gpu_memory_utilization": 0.4} if sees_gpu() else {},  # the other side is on the same GPU
    )
    env = {
        **cpu_thread_env(options.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binds to cores that this process may not use
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        handle = await GeneratorHandle.launch(config, Path(folder))
        arguments = (str(model), options.dtype, MAX_MODEL_LEN, config.max_num_seqs)
        mesh = await Mesh.spawn("offline", OfflineGenerator, *arguments, num_ranks=1, env=env, log_dir=Path(folder))

        async def through_handle(prompts: list[list[int]], max_tokens: int, seed: int) -> float:
            sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
            begin = time.perf_counter()
            groups = await asyncio.gather(*(handle.generate(prompt, sampling, work.answers) for prompt in prompts))
            num_tokens = sum(len(sample.tokens) for group in groups for sample in group)
            return num_tokens / (time.perf_counter() - begin)

        async def offline(prompts: list[list[int]], max_tokens: int, seed: int) -> float:
            return (await mesh.call("tokens_per_second", [(prompts, work.answers, max_tokens, seed)]))[0]

        try:
            yield {"handle": through_handle, "offline": offline}
        finally:
            await asyncio.gather(handle.stop(), mesh.stop())


if __name__ == "__main__":
    main()
