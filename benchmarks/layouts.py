"""Whether every layout gives the same gradient: the loss and all gradients of each layout against those of one rank.

    python -m benchmarks.layouts [--quick | --smoke] [--only NAME ...]

Tiny random models in float32 see datums of very different lengths in two calls that accumulate. Bar: the worst relative
error of any gradient tensor of any layout is at most 1e-5; for parameters that make the decays of gated delta rules, of
whose gradients float32 itself is 2e-5 from float64, 1e-4. `--quick` runs a few layouts of two ranks, `--smoke` one.
Plug-ins have layouts of their own models and engines.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Bar, parser, print_result
from rl.losses import get_loss
from rl.tiny_models import critic_batch, tiny_critic, tiny_llama, tiny_qwen3
from rl.types import Head
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole

LIMIT, DECAY_LIMIT = 1e-5, 1e-4
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight")
_OF_DECAYS = ", decays"
QUICK = ("fsdp 2", "cp 2", "pp 2")
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "qwen3": lambda path: tiny_qwen3(path, tied=False),
    "critic": tiny_critic,
    "deep_llama": lambda path: tiny_llama(path, tied=False, num_hidden_layers=5),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A model and the parallel degrees to train it with."""

    name: str
    model: str
    options: dict[str, Any]

    def config(self, models: Path) -> TrainerConfig:
        """The trainer's configuration; `models` holds one directory per model."""
        return _config(models / self.model, **self.options)


LAYOUTS = (
    Layout("fsdp 2", "llama", {"data_parallel_shard": 2}),
    Layout("replicate 2", "qwen3", {"data_parallel_replicate": 2}),
    Layout("tp 2", "qwen3", {"tensor_parallel": 2}),
    Layout("tp 2 without sp", "qwen3", {"tensor_parallel": 2, "sequence_parallel": False}),
    Layout("cp 2", "qwen3", {"context_parallel": 2}),
    Layout("pp 2", "deep_llama", {"pipeline_parallel": 2}),
    Layout("pp 2 interleaved", "deep_llama", {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"}),
    Layout("critic fsdp 2", "critic", {"data_parallel_shard": 2}),
    Layout("critic tp 2", "critic", {"tensor_parallel": 2}),
    Layout("critic cp 2", "critic", {"context_parallel": 2}),
    Layout("critic pp 2", "critic", {"pipeline_parallel": 2}),
    Layout("hsdp 2x2", "llama", {"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    Layout("fsdp 2 x tp 2", "llama", {"data_parallel_shard": 2, "tensor_parallel": 2}),
    Layout("fsdp 2 x cp 2", "llama", {"data_parallel_shard": 2, "context_parallel": 2}),
    Layout("cp 2 x tp 2", "qwen3", {"context_parallel": 2, "tensor_parallel": 2}),
    Layout("cp 4", "llama", {"context_parallel": 4}),
    Layout("pp 4", "deep_llama", {"pipeline_parallel": 4}),
    Layout("pp 2 x fsdp 2", "deep_llama", {"pipeline_parallel": 2, "data_parallel_shard": 2}),
    Layout(
        "pp 2 interleaved x fsdp 2",
        "deep_llama",
        {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B", "data_parallel_shard": 2},
    ),
    Layout("pp 2 x replicate 2", "deep_llama", {"pipeline_parallel": 2, "data_parallel_replicate": 2}),
    Layout("pp 2 x tp 2", "deep_llama", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    Layout(
        "pp 2 x tp 2 without sp",
        "deep_llama",
        {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": False},
    ),
    Layout("pp 2 x cp 2", "deep_llama", {"pipeline_parallel": 2, "context_parallel": 2}),
)


def main() -> None:
    """Runs the benchmark and prints its result."""
    print_result("layouts", *measured(__doc__, LAYOUTS, QUICK))


def measured(
    doc: str | None,
    layouts: Sequence[Layout],
    quick: Sequence[str],
    models: Mapping[str, Callable[[Path], Path]] = MODELS,
    engine_of_one: str = "torchtitan",
) -> tuple[list[Bar], dict[str, float]]:
    """Measures the layouts that the command line chooses, and prints them; `quick` are names of a few.

    `models` write a model to a directory each, and `engine_of_one` computes with one rank. Returns bars and errors.
    """
    every = [layout.name for layout in layouts]
    options_parser = parser(doc, quick="some layouts of two ranks")
    options_parser.add_argument("--only", nargs="+", metavar="NAME", choices=every, help="only these layouts")
    options = options_parser.parse_args()
    names = options.only or (quick[:1] if options.smoke else quick if options.quick else every)
    errors = measure([layout for layout in layouts if layout.name in names], models, engine_of_one)
    for name, error in errors.items():
        print(f"{name:<28}{error:10.1e}")
    decays = {name: error for name, error in errors.items() if name.endswith(_OF_DECAYS)}
    others = [error for name, error in errors.items() if name not in decays]
    bars = [Bar(name="worst_relative_gradient_error", value=max(others), limit=LIMIT)]
    if decays:
        bars.append(Bar(name="worst_relative_gradient_error_of_decays", value=max(decays.values()), limit=DECAY_LIMIT))
    return bars, errors


def measure(
    layouts: Sequence[Layout],
    models: Mapping[str, Callable[[Path], Path]] = MODELS,
    engine_of_one: str = "torchtitan",
) -> dict[str, float]:
    """The worst relative error of each layout's loss and gradients, by the layout's name; that of decays by itself."""
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        expected: dict[str, dict[str, torch.Tensor]] = {}
        for name in {layout.model for layout in layouts}:
            models[name](directory / name)
            expected[name] = _loss_and_gradients(_config(directory / name, engine=engine_of_one), 0)
        for num_ranks in sorted({layout.config(directory).num_ranks for layout in layouts}):
            # Processes take longer to start than to compute, so layouts with as many ranks share them.
            same_size = [layout for layout in layouts if layout.config(directory).num_ranks == num_ranks]
            spawn(num_ranks, _run_layouts, same_size, directory)
            for layout in same_size:
                actual = torch.load(directory / f"{layout.name}.pt")
                assert actual.keys() == expected[layout.model].keys()
                found = {name: relative_error(actual[name], x) for name, x in expected[layout.model].items()}
                decays = [error for name, error in found.items() if name.endswith(DECAYS)]
                others = [error for name, error in found.items() if not name.endswith(DECAYS)]
                errors[layout.name] = float(np.max(others))  # NaN if any error is NaN, unlike max()
                if decays:
                    errors[layout.name + _OF_DECAYS] = float(np.max(decays))
    return errors


def _config(model: Path, **options: Any) -> TrainerConfig:
    head: Head = "value" if model.name == "critic" else "lm"
    return TrainerConfig(model=model, head=head, compute_dtype="float32", max_tokens_per_microbatch=50, **options)


def _run_layouts(rank: int, layouts: Sequence[Layout], directory: Path) -> None:
    """Runs layouts one after the other; rank 0 saves each result to a file of the layout's name."""
    for layout in layouts:
        result = _loss_and_gradients(layout.config(directory), rank)
        if rank == 0:
            torch.save(result, directory / f"{layout.name}.pt")


def _loss_and_gradients(config: TrainerConfig, rank: int) -> dict[str, torch.Tensor]:
    """Gradients by name, and the loss summed over ranks."""
    engine = load_engine(config)
    batch = critic_batch(LENGTHS)
    loss = get_loss("value" if config.head == "value" else "cross_entropy")
    loss_sum = 0.0
    for datums in (batch[:6], batch[6:]):  # the second call has fewer datums than some layouts have ranks
        local_batch = plan(config, datums).split(datums)[config.data_parallel_rank(rank)]
        output = engine.forward_backward(local_batch, loss)
        loss_sum += output.metrics.get("loss", 0.0)
    total = torch.tensor(loss_sum)
    if dist.is_initialized():
        dist.all_reduce(total)
    return {"loss": total / config.num_model_parallel_ranks, **whole(engine, gradients=True)}


if __name__ == "__main__":
    main()
