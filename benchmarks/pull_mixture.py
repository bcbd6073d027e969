"""What a pull of a mixture of experts costs beside one of a dense model of as many bytes, in bfloat16.

    python -m benchmarks.pull_mixture [--quick | --smoke] [--repeats N]

A checkpoint names the weights of each expert, and vLLM stacks them: the mixture, a Qwen3-MoE of 32 experts a layer, has
32 times as many tensors of its feed-forward networks as the Llama. Both have a trainer rank and a generator rank, which
take turns. Bar: a pull of the mixture takes at most twice as long.
"""

import asyncio
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, parser, print_result
from benchmarks.weight_sync import meshes

EXPERTS, HIDDEN = 32, 256
MAX_RATIO = 2.0


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds")
    options_parser.add_argument("--repeats", type=int, default=15, help="rounds measured, after two warm-up rounds")
    options = options_parser.parse_args()
    repeats = 1 if options.smoke else 3 if options.quick else options.repeats
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(*models(Path(folder), 1 if options.smoke else 6), repeats))
    for name, value in figures.items():
        print(f"{name:<24}{value:10.3f}", flush=True)
    ratio = figures["milliseconds_pull_mixture"] / figures["milliseconds_pull_dense"]
    bars = [Bar(name="mixture_over_dense", value=ratio, limit=MAX_RATIO)]
    print_result("pull_mixture", bars, {"rounds": repeats, **figures})


def models(folder: Path, num_layers: int) -> tuple[Path, Path]:
    """A mixture and a dense model of the same size."""
    from rl.tiny_models import tiny_llama, tiny_qwen3_moe

    shape: dict[str, Any] = {
        "hidden_size": 2 * HIDDEN,
        "head_dim": 64,
        "num_hidden_layers": num_layers,
        "initializer_range": 0.05,
    }
    mixture = tiny_qwen3_moe(
        folder / "mixture", **shape, tie_word_embeddings=True, num_experts=EXPERTS, moe_intermediate_size=HIDDEN
    )
    return mixture, tiny_llama(folder / "dense", **shape, intermediate_size=EXPERTS * HIDDEN)


async def measure(mixture: Path, dense: Path, repeats: int) -> dict[str, float]:
    """Median milliseconds of pushes and pulls, and the megabytes of both."""
    taken: dict[str, dict[str, list[float]]] = {"mixture": defaultdict(list), "dense": defaultdict(list)}
    async with meshes(mixture, "bfloat16", 1) as first, meshes(dense, "bfloat16", 1) as second:
        both = {"mixture": first, "dense": second}
        for version in range(1, repeats + 3):  # the first pull records its copies, the second repeats them
            for name, processes in both.items():
                await processes.round(version, taken[name])
        megabytes = {f"megabytes_{name}": await each.num_bytes() / 1e6 for name, each in both.items()}
    medians = {
        f"milliseconds_{part}_{name}": 1e3 * statistics.median(seconds[part][2:])
        for name, seconds in taken.items()
        for part in ("copy", "push", "pull")
    }
    return {**megabytes, **medians}


if __name__ == "__main__":
    main()
