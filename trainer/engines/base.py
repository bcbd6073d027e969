"""The interface that every training backend implements. It holds nothing that only one of them needs.

Numbers pass through it as torch tensors. What an engine computes with is its own business; the one in
`examples/engines/mindspore_engine` computes with MindSpore, in another process.

An engine does the mathematics of one rank. It knows neither actors nor roles, and can be used on its own:

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

With several ranks, every rank makes the same calls in the same order with the same number of micro-batches. A rank that
has fewer datums passes empty micro-batches. Losses and gradients are sums over tokens, datums, calls and ranks.
"""

import contextlib
import re
import resource
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from rl.lora import LoRAConfig
from rl.losses import Loss
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput

_RESET_PEAK = "5"  # see proc(5)
Microbatch = Sequence[Datum]


class RankFailureError(RuntimeError):
    """This rank gave up a call because another rank failed in it. The other rank's error says why."""


class PeakMemory:
    """Most bytes held in each phase: by all tensors on a GPU, by whole processes on the CPU."""

    def __init__(self, device: torch.device, children: Sequence[int] = ()) -> None:
        """`children` are the numbers of processes that compute for this one on the CPU, and count with it."""
        self._device = device
        self._children = children
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measures the block, since the process began where Linux cannot reset the peak. Its errors keep no tensors."""
        handled = sys.exception()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                for process in ("self", *self._children):
                    Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK)
        try:
            yield
        except BaseException as error:
            failed: BaseException | None = error
            while failed is not None and failed is not handled:
                traceback.clear_frames(failed.__traceback__)
                failed = failed.__context__
            raise
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self.peak_bytes())

    def peak_bytes(self) -> int:
        """Most bytes held since the phase began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own + sum(map(_peak_bytes_of, self._children))

    def take(self) -> dict[str, float]:
        """Returns `memory_peak_bytes_PHASE_max` of every phase measured since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory_peak_bytes_{name}_max": float(peak) for name, peak in peaks.items()}


def _peak_bytes_of(process: int) -> int:
    """Most bytes that another process held; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


class Engine(ABC):
    """One rank's shard of a model, its gradient and its optimizer state.

    With `TrainerConfig.lora` the model is frozen, and `adapter` makes adapters over it, each of which is an engine.
    """

    arithmetic = ""
    """What a generator has to compute by, for `EnginePart.check_version`, and where this engine computes."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Optimizer steps applied so far."""

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether a prefix that datums of a micro-batch share is computed once; see `rl/data/packing.py`."""

    @property
    @abstractmethod
    def memory(self) -> PeakMemory:
        """Measures `forward`, `forward_backward` and `optim_step`. The caller may measure further phases with it."""

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all micro-batches of all ranks, to the accumulated gradient.

        What a user may get wrong was checked before: the datums by `validate_batch`, the loss by `Loss.check_head`.

        Returns this rank's part: log-probs, or a critic's values, per datum in the order given, and metrics summed over
        this rank's datums. The metrics `memory_peak_bytes_max`, measured by `memory`, and `seconds_engine_max` are
        about this call; `model_flops`, which may be missing, is the count of `ModelFlops` for these datums. If
        any rank raises, the accumulated gradient is as it was before the call. Datums that score nothing have a loss
        of 0 and a gradient of zeros, which an optimizer step accepts.
        """

    @abstractmethod
    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Returns log-probs (and entropies), or a critic's values, of this rank's datums, in the order given.

        Computes no gradient. Gradients and optimizer state take no memory until the first `forward_backward`, so a
        frozen reference or reward model is an engine that only gets this call.
        """

    @abstractmethod
    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Applies one AdamW step with exactly these values to the accumulated gradient and clears it.

        A gradient that is not finite is cleared and changes nothing else. The metrics are `memory.take()`'s.
        Raises ValueError, with all state as it was, if no gradient was accumulated or a pattern of
        `learning_rate_multipliers` matches no parameter.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drops the accumulated gradient."""

    @abstractmethod
    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Keeps parameters, gradients or optimizer state on `device` from now on: "cpu", or the accelerator's kind.

        Offloaded state is moved to the device for each call and back afterwards; within `train_mode` or `eval_mode` it
        stays on the device. An engine that computes on the CPU moves nothing. Raises ValueError if nothing is chosen,
        and for another device.
        """

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Within the block, the model is in training mode and its whole state is on the device."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Within the block, the model is in evaluation mode and its parameters are on the device."""

    @abstractmethod
    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the float32 parameters of which this rank holds a part, by Hugging Face name, with their `grad`.

        They are to be read only. A parameter of which several ranks hold parts is a DTensor, and together the ranks
        yield every parameter. A gradient is present while it is on the same device as its parameter. This is a
        collective for engines that have to gather parameters.
        """

    @property
    def frozen_names(self) -> Collection[str]:
        """The names of parameters that `load_checkpoint` changes and nothing else."""
        return ()

    @abstractmethod
    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version. `path` appears only once everything is on disk.

        With `asynchronous`, training continues meanwhile, and `wait_for_checkpoint` raises the error of a failed save.
        With `keep_last`, only that many checkpoints, this one and the highest versions, stay in its directory.
        """

    @abstractmethod
    def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written. Raises the error of the last asynchronous save."""

    @abstractmethod
    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores what `save_checkpoint` wrote, drops any accumulated gradient and returns the policy version.

        The layout may differ, and so may the engine if the parameters agree. The random state is restored only if the
        number of ranks is the same. With `weights_only`, only the parameters are loaded: the optimizer is reset and the
        version becomes 0.
        """

    @abstractmethod
    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        """Writes a directory that transformers and vLLM can load, with weights of `dtype`."""

    def adapter(self, name: str, config: LoRAConfig) -> "Engine":
        """Makes an adapter over this engine's frozen model: an engine whose parameters are the adapter's A and B.

        Every verb works on it, with its own gradient, optimizer state and version. Its `hf_parameters` have PEFT's
        names, its `export_hf` merges it into the model. The engines of a model take turns: a call of one ends before
        another's begins. A collective.

        Raises ValueError if the model is not frozen, if it has an adapter of this name, if it lacks projections that
        `config` adapts, or if memory is short.
        """
        del name, config
        raise ValueError(_NOT_FROZEN)

    def drop_adapter(self, name: str) -> None:
        """Frees an adapter once its checkpoint is written; its engine must not be used again. A collective.

        Raises ValueError, naming those there are, for an unknown name.
        """
        del name
        raise ValueError(_NOT_FROZEN)

    def export_peft(self, path: Path, dtype: torch.dtype) -> None:
        """Writes an adapter as a directory that peft and vLLM load onto the model, with tensors of `dtype`.

        Raises ValueError if this engine is not an adapter's.
        """
        del path, dtype
        raise ValueError("export_peft writes an adapter, and this engine trains the model itself; use export_hf")


_NOT_FROZEN = "this trainer trains the model itself; start it with TrainerConfig.lora to train adapters over the model"
