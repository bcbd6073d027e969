"""What every training backend does, and nothing that only one of them needs.

An engine is the mathematics of one rank. It knows neither actors nor roles, and runs alone:

    import numpy as np, pathlib
    from rl import losses, types
    from trainer import config, engines
    engine = engines.load_engine(config.TrainerConfig(model=pathlib.Path("model"), compute_dtype="float32"))
    tokens = np.arange(1, 30)
    datum = types.Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:]})
    for step in range(5):
        output = engine.forward_backward([[datum]], losses.get_loss("cross_entropy"))
        engine.optim_step(types.AdamParams(learning_rate=1e-3), grad_scale=1 / output.metrics["num_loss_tokens"])
        print(step, output.metrics["loss"])

With several ranks, every rank makes the same calls in the same order with equally many micro-batches; those of a rank
that has fewer datums are empty. Losses are sums, and so are gradients: over tokens, datums, calls and ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl.data.packing import PackedRow
from rl.losses import Loss
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput
from trainer.engines.memory import PeakMemory

Microbatch = Sequence[Datum]


@dataclass(frozen=True, slots=True)
class MicrobatchHooks:
    """A user's functions around each micro-batch of `forward` and `forward_backward`; the same on every rank.

    One that raises ends the call on all ranks, with the gradient as it was.
    """

    before: Callable[[Microbatch], Microbatch] | None = None
    """Returns the datums to compute instead: as many as it is given, each as long as it was."""
    after: Callable[[PackedRow, Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None
    """Takes a row, its log-probs or values [S] and, where asked for, entropies [S], all without gradient; returns what
    the caller gets in their place. What the loss gets instead is the business of the loss."""


class RankFailureError(RuntimeError):
    """This rank gave up a call because another rank failed in it; the other rank's error says why."""


class Engine(ABC):
    """One rank's share of a model, its gradient and its optimizer state."""

    hooks: MicrobatchHooks = MicrobatchHooks()
    """May be set at any time between calls."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Optimizer steps applied so far."""

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether datums of a micro-batch that begin alike cost their common tokens once; see `rl/data/packing.py`."""

    @property
    @abstractmethod
    def memory(self) -> PeakMemory:
        """Measures `forward`, `forward_backward` and `optim_step`, and whatever else this rank's owner asks it to."""

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all micro-batches of all ranks, to the accumulated gradient.

        Returns this rank's part: log-probs, or a critic's values, per datum in the order given, metrics summed over
        this rank's datums, and of this call `memory_peak_bytes_max`, as `memory` measures it, and `seconds_engine_max`.
        When anything raises, on any rank, the accumulated gradient is as it was before the call.
        """

    @abstractmethod
    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Log-probs (and entropies), or a critic's values, of this rank's datums, in the order given.

        Leaves no gradient, and until the first `forward_backward` neither gradients nor optimizer state take memory: a
        frozen reference or reward model is an engine that is only asked for this.
        """

    @abstractmethod
    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Applies one AdamW step with exactly these values to the accumulated gradient and clears it.

        A gradient that is not finite is cleared and changes nothing else. The metrics are what `memory` takes. Raises
        ValueError when no gradient was accumulated.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drops the accumulated gradient."""

    @abstractmethod
    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Lets parameters, gradients or optimizer state rest on `device` from now on: "cpu", or the accelerator's kind.

        A call brings in what it needs of what is elsewhere and puts it back afterwards; within `train_mode` or
        `eval_mode` it stays in. Raises ValueError when nothing is to be moved, or to a device that is not this rank's.
        """

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Has the model in training mode, and parameters, gradients and optimizer state on the device, in the block."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Has the model in evaluation mode, and its parameters on the device, in the block."""

    @abstractmethod
    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 parameters that this rank holds a part of, by Hugging Face name, with their `grad`, to be read.

        A DTensor where several ranks hold parts. Together the ranks hold every parameter. A gradient is there while it
        is on the same device as its parameter. A collective where shards have to be put together for it.
        """

    @abstractmethod
    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version; `path` appears only once all of it is on disk.

        With `asynchronous` that happens while training goes on, and `wait_for_checkpoint` says how it ended. With
        `keep_last`, only that many checkpoints of the highest versions stay in the directory of `path`.
        """

    @abstractmethod
    def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written; raises what the last asynchronous one raised."""

    @abstractmethod
    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores what `save_checkpoint` wrote and drops any accumulated gradient; returns the policy version.

        The layout, and the engine where parameters agree, may differ; the random state is restored for the same number
        of ranks. With `weights_only` nothing but the parameters is taken over: the optimizer is reset, the version 0.
        """

    @abstractmethod
    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        """Writes a directory that transformers and vLLM load, with weights of that dtype."""
