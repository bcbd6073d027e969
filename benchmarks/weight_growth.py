"""How the time of a weight update grows with the model, and how long an update between sharded ranks takes.

    python -m benchmarks.weight_growth [--quick | --smoke] [--repeats N]

Random Llamas of 272 tensors and 66, 263 and 1,050 MB in bfloat16 (a quarter of SmolLM2, once and four times its size)
go from one trainer rank to one generator rank with two threads each. The middle one also goes from two FSDP ranks to
two tensor-parallel ranks with one thread each. Bars: the fixed cost of an update, which is where a line through the
three sizes meets zero bytes, is at most 50 ms; the largest model takes at most 4.6 times as long as the middle one,
which has a quarter of its bytes. `--quick` leaves out the largest model.
"""

import asyncio
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, parser, print_result
from benchmarks.weight_sync import Seconds, meshes, show

HIDDEN_SIZES = (256, 512, 1024)
DTYPE = "bfloat16"


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds, without the largest model")
    options_parser.add_argument("--repeats", type=int, default=7, help="rounds measured, after two warm-up rounds")
    options = options_parser.parse_args()
    sizes, num_layers, repeats = HIDDEN_SIZES, 30, options.repeats
    if options.quick or options.smoke:
        sizes, num_layers, repeats = ((128, 256), 2, 1) if options.smoke else (HIDDEN_SIZES[:2], 30, 3)
    results: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {size: random_llama(Path(folder) / str(size), size, num_layers) for size in sizes}
        for size in sizes:
            results.append(_measured(models[size], repeats, num_ranks=1, threads=2))
        sharded = _measured(models[sizes[1]], repeats, num_ranks=2, threads=1)

    megabytes, updates = [size for size, _ in results], [medians["update"] for _, medians in results]
    slope, fixed = np.polyfit(megabytes, updates, 1)
    bars = [Bar(name="fixed_cost_ms", value=1e3 * float(fixed), limit=50)]
    if len(updates) > 2:
        bars.append(Bar(name="growth_of_4_times_the_bytes", value=updates[2] / updates[1], limit=4.6))
    print_result(
        "weight_growth",
        bars,
        {
            "rounds": repeats,
            "megabytes": megabytes,
            "seconds_update": updates,
            "seconds_per_gigabyte": 1e3 * float(slope),
            "ratio_to_copy": [medians["update"] / medians["copy"] for _, medians in results],
            **{f"fsdp2_to_tp2_seconds_{name}": value for name, value in sharded[1].items()},
            "fsdp2_to_tp2_ratio_to_copy": sharded[1]["update"] / sharded[1]["copy"],
        },
    )


def _measured(model: Path, repeats: int, *, num_ranks: int, threads: int) -> tuple[float, dict[str, float]]:
    """Megabytes of an update, and the median seconds of each of its parts."""
    seconds, num_bytes = asyncio.run(measure(model, repeats, num_ranks, threads))
    print(f"-- {num_bytes / 1e6:.0f} MB, {num_ranks} to {num_ranks} ranks")
    return num_bytes / 1e6, show(seconds)


async def measure(model: Path, repeats: int, num_ranks: int, threads: int) -> tuple[Seconds, int]:
    """Seconds of each part in every round after two warm-up rounds, and the bytes of an update."""
    seconds: dict[str, list[float]] = defaultdict(list)
    async with meshes(model, DTYPE, threads, num_ranks=num_ranks, tensor_parallel=num_ranks) as processes:
        for version in range(1, repeats + 3):
            await processes.round(version, seconds)
        return {name: values[2:] for name, values in seconds.items()}, await processes.num_bytes()


def random_llama(path: Path, hidden_size: int, num_layers: int) -> Path:
    """Writes a model whose dimensions are all multiples of the hidden size, so that bytes grow with its square."""
    import torch
    from safetensors.torch import save_file

    heads, head_dim, width, vocab_size = hidden_size // 64, 64, hidden_size * 7 // 2, 96 * hidden_size
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": DTYPE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    layer = {
        "input_layernorm": (hidden_size,),
        "post_attention_layernorm": (hidden_size,),
        "self_attn.q_proj": (hidden_size, hidden_size),
        "self_attn.k_proj": (hidden_size // 2, hidden_size),
        "self_attn.v_proj": (hidden_size // 2, hidden_size),
        "self_attn.o_proj": (hidden_size, hidden_size),
        "mlp.gate_proj": (width, hidden_size),
        "mlp.up_proj": (width, hidden_size),
        "mlp.down_proj": (hidden_size, width),
    }
    shapes = {"model.embed_tokens": (vocab_size, hidden_size), "model.norm": (hidden_size,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1, generator=generator)
        for name, shape in shapes.items()
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


if __name__ == "__main__":
    main()
