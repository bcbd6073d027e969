"""Whether the gradient depends on how a batch is cut: into calls, by token budgets, packed or padded, over ranks.

    python -m benchmarks.split_invariance [--quick | --smoke]

Two tiny random models in float32 see 24 datums of very different lengths in 1 or 5 calls, with 3 token budgets, packed
or padded, on 1 or 2 data-parallel ranks. Each of these cuts is compared with one rank that computes one datum per
micro-batch in a single call. Bar: the worst relative error of the loss and of any gradient tensor is at most 1e-5.
`--quick` measures one model, `--smoke` one cut of it on one
rank.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Bar, parser, print_result
from rl.data.batching import plan_batch
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error, spawn, whole

LIMIT = 1e-5
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "qwen3": lambda path: tiny_qwen3(path, tied=False),
}
LENGTHS = tuple(int(n) for n in np.geomspace(1, 120, 24))
"""Tokens of each datum, from one to nearly the models' context."""
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to compute a batch."""

    num_ranks: int
    num_calls: int
    budget: int
    """Tokens of a micro-batch. A longer datum is a micro-batch of its own, so a budget of 1 packs nothing."""
    padded: bool
    """Whether tokens of weight 0 make every datum as long as the longest."""

    @property
    def name(self) -> str:
        """The name in the figures."""
        form = "padded" if self.padded else "packed"
        return f"{form}, {self.num_ranks} ranks, {self.num_calls} calls, budget {self.budget}"


REFERENCE = Cut(num_ranks=1, num_calls=1, budget=1, padded=False)
CUTS = (REFERENCE, *itertools.starmap(Cut, itertools.product((1, 2), (1, 5), (64, 150, 1000), (False, True))))


def main() -> None:
    """Runs the benchmark and prints its result."""
    options = parser(__doc__, quick="one model").parse_args()
    names = ["llama"] if options.quick or options.smoke else list(MODELS)
    errors = measure(names, CUTS[:2] if options.smoke else CUTS)
    for name, error in errors.items():
        print(f"{name:<60}{error:10.1e}")
    print_result(
        "split_invariance",
        [Bar(name="worst_relative_gradient_error", value=max(errors.values()), limit=LIMIT)],
        dict(errors),
    )


def measure(models: Sequence[str], cuts: Sequence[Cut] = CUTS) -> dict[str, float]:
    """The worst relative error of the loss and of any gradient, for every model and cut; `cuts` needs `REFERENCE`."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name in models:
            MODELS[name](directory / name)
        results: dict[tuple[str, Cut], Gradients] = {}
        for num_ranks in sorted({cut.num_ranks for cut in cuts}):
            if num_ranks == 1:
                _compute(0, 1, models, cuts, directory)
            else:
                spawn(num_ranks, _compute, num_ranks, models, cuts, directory)
            results |= torch.load(directory / f"{num_ranks}.pt", weights_only=False)
    errors: dict[str, float] = {}
    for (model, cut), actual in results.items():
        expected = results[model, REFERENCE]
        assert actual.keys() == expected.keys()
        errors[f"{model}: {cut.name}"] = max(relative_error(actual[name], expected[name]) for name in expected)
    return errors


def _compute(rank: int, num_ranks: int, models: Sequence[str], cuts: Sequence[Cut], directory: Path) -> None:
    """Computes the cuts for `num_ranks` ranks; rank 0 saves the results to a file."""
    results: dict[tuple[str, Cut], Gradients] = {}
    for name in models:
        engine = load_engine(
            TrainerConfig(model=directory / name, compute_dtype="float32", data_parallel_shard=num_ranks)
        )
        for cut in cuts:
            if cut.num_ranks == num_ranks:
                results[name, cut] = _loss_and_gradients(engine, rank, cut)
    if rank == 0:
        torch.save(results, directory / f"{num_ranks}.pt")


def _loss_and_gradients(engine: Engine, rank: int, cut: Cut) -> Gradients:
    """Gradients by name, and the loss summed over calls and ranks."""
    engine.zero_grad()
    loss = torch.zeros(())
    datums = random_batch(LENGTHS)
    for batch in _calls([_pad(datum) for datum in datums] if cut.padded else datums, cut.num_calls):
        plan = plan_batch(
            batch, num_ranks=cut.num_ranks, max_tokens_per_microbatch=cut.budget, share_prefixes=engine.shares_prefixes
        )
        output = engine.forward_backward(plan.split(batch)[rank], get_loss("importance_sampling"))
        loss += output.metrics.get("loss", 0.0)
    if dist.is_initialized():
        dist.all_reduce(loss)
    return {"loss": loss, **whole(engine, gradients=True)}


def _pad(datum: Datum) -> Datum:
    """Pads a datum to the length of the longest."""
    missing = (0, max(LENGTHS) - len(datum.tokens))
    return Datum(
        tokens=np.pad(datum.tokens, missing),
        loss_inputs={name: np.pad(array, missing) for name, array in datum.loss_inputs.items()},
    )


def _calls(batch: Sequence[Datum], num_calls: int) -> Iterator[list[Datum]]:
    """Splits the batch into `num_calls` parts, each with short and long datums."""
    for first in range(num_calls):
        yield list(batch[first::num_calls])


if __name__ == "__main__":
    main()
