"""Layouts of the engine megatron: their gradients against those of one rank of torchtitan.

    python -m plugins.megatron.benchmarks.layouts_of_megatron [--quick | --smoke] [--only NAME ...]

As `benchmarks.layouts`, with its bars. Models with experts need ownloop-families.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import layouts
from benchmarks.harness import print_result
from benchmarks.layouts import Layout, measured
from rl.tiny_models import tiny_qwen3_moe

QUICK = ("megatron tp 2", "megatron cp 2", "megatron pp 2")
MODELS: Mapping[str, Callable[[Path], Path]] = {
    **layouts.MODELS,
    "qwen3_moe": tiny_qwen3_moe,
    "deep_moe": lambda path: tiny_qwen3_moe(path, num_hidden_layers=4),
}
LAYOUTS = tuple(
    Layout(f"megatron {name}", model, {"engine": "megatron", **degrees})
    for name, model, degrees in (
        ("1", "qwen3", {}),
        ("replicate 2", "qwen3", {"data_parallel_replicate": 2}),
        ("shard 2", "qwen3", {"data_parallel_shard": 2}),
        ("cp 2", "qwen3", {"context_parallel": 2}),
        ("tp 2", "qwen3", {"tensor_parallel": 2}),
        ("tp 2 without sp", "qwen3", {"tensor_parallel": 2, "sequence_parallel": False}),
        ("critic tp 2", "critic", {"tensor_parallel": 2}),
        ("critic cp 2", "critic", {"context_parallel": 2}),
        ("pp 2", "qwen3", {"pipeline_parallel": 2}),
        ("pp 2 interleaved", "deep_moe", {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"}),
        ("moe tp 2", "qwen3_moe", {"tensor_parallel": 2}),
        ("ep 2", "qwen3_moe", {"data_parallel_replicate": 2, "expert_parallel": 2}),
        ("ep 2 within tp 2", "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
        ("ep 2 within cp 2", "qwen3_moe", {"context_parallel": 2, "expert_parallel": 2}),
        ("pp 2 x tp 2", "qwen3", {"pipeline_parallel": 2, "tensor_parallel": 2}),
        ("pp 2 x cp 2", "qwen3", {"pipeline_parallel": 2, "context_parallel": 2}),
        ("cp 2 x tp 2", "qwen3", {"context_parallel": 2, "tensor_parallel": 2}),
        ("replicate 2 x tp 2", "qwen3", {"data_parallel_replicate": 2, "tensor_parallel": 2}),
        ("shard 2 x tp 2", "qwen3", {"data_parallel_shard": 2, "tensor_parallel": 2}),
        ("tp 2 x ep 2", "qwen3_moe", {"data_parallel_replicate": 2, "tensor_parallel": 2, "expert_parallel": 2}),
        ("shard 2 x tp 2 x ep 2", "qwen3_moe", {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2}),
        ("tp 2 x ep 4", "qwen3_moe", {"data_parallel_replicate": 2, "tensor_parallel": 2, "expert_parallel": 4}),
        ("pp 2 x ep 2", "deep_moe", {"pipeline_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 2}),
        ("pp 2 x tp 2 x ep 2", "deep_moe", {"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2}),
    )
)


def main() -> None:
    """Runs the benchmark and prints its result."""
    print_result("layouts_of_megatron", *measured(__doc__, LAYOUTS, QUICK, MODELS))


if __name__ == "__main__":
    main()
