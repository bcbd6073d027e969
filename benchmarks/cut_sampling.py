"""Time of sampling with a cut of the vocabulary, against sampling from all tokens: of generation, and of the sampler.

    python -m benchmarks.cut_sampling [--quick | --smoke] [--rounds N] [--threads N] [--dtype D]

A generator of SmolLM2 samples 64 requests of 64 new tokens at temperature 0.7, from the whole vocabulary and with top-p
0.9, which keeps at most 512 tokens. The two take turns, and who begins alternates between rounds. No prompt comes
twice. The kept tokens of every token come back with the completions. Bar: with the cut, sampling takes at most 1.4
times as long, as the median of the rounds' ratios. The sampler's own time for a step of as many sequences is measured
too, without a bar."""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.system.hardware import cpu_dtype
from rl.types import Completion, SamplingParams

PROMPT_TOKENS = 48
MAX_MODEL_LEN = 192
TEMPERATURE = 0.7
CUTS = {"uncut": 1.0, "cut": 0.9}
"""Top-p of each side."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="2 rounds of 16 new tokens")
    options_parser.add_argument("--rounds", type=int, default=5, help="rounds measured, after a short warm-up round")
    options_parser.add_argument("--threads", type=int, default=2, help="threads of the generator")
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="default: what this CPU does fast")
    options = options_parser.parse_args()
    requests = 2 if options.smoke else 64
    rounds, max_tokens = (1, 4) if options.smoke else (2, 16) if options.quick else (options.rounds, 64)
    with benchmark_model(smoke=options.smoke) as model:
        seconds, sampled = asyncio.run(measure(model, options, requests, rounds, max_tokens))
        torch.set_num_threads(options.threads)
        alone = {side: sampler_ms(requests, vocab_size(model), top_p) for side, top_p in CUTS.items()}
    ratios = [cut / uncut for cut, uncut in zip(seconds["cut"], seconds["uncut"], strict=True)]
    counts = [count for sample in sampled if sample.kept is not None for count in sample.kept.counts.tolist()]
    print_result(
        "cut_sampling",
        [Bar(name="time_ratio_to_uncut", value=statistics.median(ratios), limit=1.4)],
        {
            "ratios": ratios,
            **{f"seconds_{side}": statistics.median(values) for side, values in seconds.items()},
            **{f"sampler_ms_{side}": value for side, value in alone.items()},
            "sampler_ratio": alone["cut"] / alone["uncut"],
            "kept_words_mean": statistics.fmean(counts),
            "requests": requests,
            "new_tokens": max_tokens,
            "threads": options.threads,
            "dtype": options.dtype,
        },
    )


async def measure(
    model: Path, options: argparse.Namespace, requests: int, rounds: int, max_tokens: int
) -> tuple[dict[str, list[float]], list[Completion]]:
    """Seconds of each side in every round, and the completions of the last round with a cut."""
    # Here, because a module that imports Monarch also configures it, for this process and its children.
    from controller.handles.generator_handle import GeneratorHandle
    from generator.config import GeneratorConfig

    config = GeneratorConfig(
        model=model,
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=requests,
        num_threads=options.threads,
    )
    seconds: dict[str, list[float]] = {side: [] for side in CUTS}
    sampled: list[Completion] = []
    with tempfile.TemporaryDirectory() as folder:
        handle = await GeneratorHandle.launch(config, Path(folder))
        try:
            for number in range(rounds + 1):
                for side in CUTS if number % 2 else reversed(CUTS):
                    sampling = SamplingParams(
                        max_tokens=max_tokens, temperature=TEMPERATURE, top_p=CUTS[side], seed=number, ignore_eos=True
                    )
                    prompts = make_prompts(requests, vocab_size(model), 2 * number + (side == "cut"))
                    begin = time.perf_counter()
                    groups = await asyncio.gather(*(handle.generate(prompt, sampling) for prompt in prompts))
                    if number:
                        seconds[side].append(time.perf_counter() - begin)
                    if side == "cut":
                        sampled = [sample for group in groups for sample in group]
        finally:
            await handle.stop()
    return seconds, sampled


def make_prompts(count: int, num_words: int, number: int) -> list[list[int]]:
    """Prompts that no other round has."""
    size = min(num_words, 40_000)
    return [[(1000 + 3203 * number + 97 * i + j) % size for j in range(PROMPT_TOKENS)] for i in range(count)]


def sampler_ms(num_rows: int, num_words: int, top_p: float) -> float:
    """The sampler's own time for one step, of logits as peaked as a language model's."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from generator.cpu.sampler import patch_sampling

    patch_sampling()
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, num_words, generator=generator)
    k = torch.full((num_rows,), min(512, num_words)) if top_p < 1 else None
    p = torch.full((num_rows,), top_p) if top_p < 1 else None
    sampler = TopKTopPSampler("processed_logprobs")
    times: list[float] = []
    for _ in range(12):
        step = logits.clone()
        begin = time.perf_counter()
        sampler.forward_cpu(step, {}, k, p)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
