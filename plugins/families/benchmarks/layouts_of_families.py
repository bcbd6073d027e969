"""Layouts of models with experts, and of this plug-in's families: their gradients against those of one rank.

    python -m plugins.families.benchmarks.layouts_of_families [--quick | --smoke] [--only NAME ...]

As `benchmarks.layouts`, with its bars. Ranks of torchtitan and of fsdp2 are compared with one rank of fsdp2, which
computes the model of transformers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import print_result
from benchmarks.layouts import Layout, measured
from ownloop_families.tiny import TINY_FAMILIES
from rl.tiny_models import tiny_qwen3_moe

QUICK = ("ep 2", "moe cp 2", "moe pp 2")
_TINY = {name: make for name, (_, make) in TINY_FAMILIES.items() if name != "qwen3_moe"}
MODELS: Mapping[str, Callable[[Path], Path]] = {
    "qwen3_moe": tiny_qwen3_moe,
    "deep_moe": lambda path: tiny_qwen3_moe(path, num_hidden_layers=4),
    **_TINY,
}
EXPERTS = (
    Layout("moe pp 2", "deep_moe", {"pipeline_parallel": 2}),
    Layout("moe fsdp 2", "qwen3_moe", {"data_parallel_shard": 2}),
    Layout("moe cp 2", "qwen3_moe", {"context_parallel": 2}),
    Layout("ep 2", "qwen3_moe", {"data_parallel_shard": 2, "expert_parallel": 2}),
    Layout("ep 2 within tp 2", "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    Layout("ep 2 within cp 2", "qwen3_moe", {"context_parallel": 2, "expert_parallel": 2}),
    Layout("pp 2 x ep 2", "deep_moe", {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}),
    Layout("ep 4", "qwen3_moe", {"data_parallel_shard": 4, "expert_parallel": 4}),
    Layout("fsdp 2 x ep 2", "qwen3_moe", {"data_parallel_shard": 4, "expert_parallel": 2}),
    Layout(
        "hsdp 2 x ep 2", "qwen3_moe", {"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 2}
    ),
    Layout("fsdp 2 x tp 2 x ep 2", "qwen3_moe", {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2}),
)
_REFUSED = {
    "gpt_oss": ("context_parallel",),
    "qwen3_5": ("context_parallel", "expert_parallel"),
    "qwen3_5_moe": ("context_parallel",),
}
"""Options of layouts that a family does not have."""
FAMILIES = (
    *(Layout(f"fsdp2 {name}", name, {"engine": "fsdp2", "data_parallel_shard": 2}) for name in _TINY),
    *(
        Layout(f"{model} {name}", model, degrees)
        for model in ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_5_moe")
        for name, degrees in (
            ("1", {}),
            ("1 recomputed", {"activation_checkpointing": "selective"}),
            ("fsdp 2", {"data_parallel_shard": 2}),
            ("fsdp 2 recomputed", {"data_parallel_shard": 2, "activation_checkpointing": "full"}),
            ("replicate 2", {"data_parallel_replicate": 2}),
            ("pp 2", {"pipeline_parallel": 2}),
            ("ep 2", {"data_parallel_shard": 2, "expert_parallel": 2}),
            ("ep 2 within tp 2", {"tensor_parallel": 2, "expert_parallel": 2}),
            ("cp 2", {"context_parallel": 2}),
            ("ep 2 within cp 2", {"context_parallel": 2, "expert_parallel": 2}),
            ("fsdp 2 x ep 2", {"data_parallel_shard": 4, "expert_parallel": 2}),
            ("hsdp 2 x ep 2", {"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 2}),
            ("fsdp 2 x tp 2 x ep 2", {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2}),
            ("pp 2 x ep 2", {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}),
        )
        if not degrees.keys() & _REFUSED.get(model, ())
    ),
    *(
        Layout(f"qwen3_5 {name}", "qwen3_5", {"tensor_parallel": 2, **degrees})
        for name, degrees in (
            ("tp 2", {}),
            ("tp 2 without sp", {"sequence_parallel": False}),
            ("fsdp 2 x tp 2", {"data_parallel_shard": 2}),
            ("pp 2 x tp 2", {"pipeline_parallel": 2}),
        )
    ),
)
LAYOUTS = (*EXPERTS, *FAMILIES)


def main() -> None:
    """Runs the benchmark and prints its result."""
    print_result("layouts_of_families", *measured(__doc__, LAYOUTS, QUICK, MODELS, "fsdp2"))


if __name__ == "__main__":
    main()
