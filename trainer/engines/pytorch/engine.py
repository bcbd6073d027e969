"""What every engine on PyTorch shares: how gradients accumulate and fail, steps, checkpoints, exports.

An engine of this kind brings a model, its parameters by Hugging Face name and one method that scores a packed row.
How the model is built, sharded and named is its own business, and nothing of that is here.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl.data.packing import PackedRow, pack_row
from rl.losses import Loss, LossInputs
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from trainer import checkpoint
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch
from trainer.engines.memory import PeakMemory
from trainer.engines.pytorch.failure_sync import FailureSync
from trainer.engines.pytorch.mixed_precision import MixedPrecision
from trainer.engines.pytorch.offload import PARTS, Offload, Part
from trainer.engines.pytorch.optimizer import Optimizer
from trainer.engines.pytorch.outputs import IDLE_DATUM, OutputCollector
from trainer.engines.pytorch.ranks import DTYPES
from trainer.export import write_hf_directory
from trainer.saver import CheckpointSaver


class TorchEngine(Engine):
    """One rank of a model whose gradients autograd accumulates in `parameter.grad`."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        model_info: Mapping[str, Any],
        device: torch.device,
        *,
        replicas: int = 1,
    ) -> None:
        """`parameters` are float32, by Hugging Face name, in the order of `model`; `model_info` goes into checkpoints.

        Those that are not DTensors stand for parts of which `replicas` ranks each hold the same.

        With one rank and another compute dtype, `model` is turned into copies of that dtype.
        """
        self._config = config
        self._model = model
        self._model_info = model_info
        self._device = device
        dtype = DTYPES[config.compute_dtype]
        self._mixed_precision: MixedPrecision | None = None
        if config.num_ranks == 1 and dtype != torch.float32:
            self._mixed_precision = MixedPrecision(model, dtype)
            parameters = dict(zip(parameters, self._mixed_precision.master_weights, strict=True))
        self._parameters = parameters
        self._optimizer = Optimizer(parameters, replicas)
        self._offload = Offload(device, self._move)
        self._memory = PeakMemory(device)
        self._failure_sync = FailureSync(config.num_ranks, device)
        self._detached_gradients: dict[str, Tensor] = {}  # while they are elsewhere than their parameters
        self._saver = CheckpointSaver()
        self._version = 0

    @abstractmethod
    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs [S] float32 of a row's scored positions and, if asked for, entropies [S] float32.

        Of a value head, values [S] float32 and None.
        """

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def memory(self) -> PeakMemory:
        return self._memory

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        loss.check_head(self._config.head)
        output = OutputCollector(self._memory, self._config.head, entropy=False)
        with (
            self._memory.phase("forward_backward"),
            self._offload.resident("model", "gradients"),
            self._gradient_restored_on_failure(),
        ):
            self._forward_backward_rows(self._rows(microbatches), loss, output)
            return self._result(output)

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        if entropy:
            self._config.check_entropy()
        output = OutputCollector(self._memory, self._config.head, entropy=entropy)
        with self._memory.phase("forward"), self.eval_mode(), torch.no_grad():
            self._forward_rows(self._rows(microbatches), output, entropy=entropy)
            self._reshard()
            return self._result(output)

    def _forward_backward_rows(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        """Runs a call's rows, None for those of peers only, and adds each of this rank's to the output."""
        for row in rows:
            if row is not None and len(row.scored):
                self._forward_backward_row(row, loss, output)
                continue
            if row is not None:
                output.add(row, None, None, {})
            if self._config.num_ranks > 1:
                scores, _ = self._score(self._idle_row(), entropy=False)
                self._failure_sync.tell(failed=False)
                (scores.sum() * 0.0).backward()

    def _forward_backward_row(self, row: PackedRow, loss: Loss, output: OutputCollector) -> None:
        scores, entropy = self._score(row, entropy=loss.needs_entropy)
        loss_sum, metrics = self._failure_sync.do(lambda: loss(scores, entropy, self._loss_inputs(row)))
        output.add(row, scores, None, {"loss": loss_sum.detach(), **metrics})
        loss_sum.backward()

    def _forward_rows(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        """As `_forward_backward_rows`, without a loss."""
        for row in rows:
            if row is not None and len(row.scored):
                output.add(row, *self._score(row, entropy=entropy), {})
                continue
            if row is not None:
                output.add(row, None, None, {})
            if self._config.num_ranks > 1:
                self._score(self._idle_row(), entropy=entropy)

    def _rows(self, microbatches: Sequence[Microbatch]) -> list[PackedRow | None]:
        """What a call computes."""
        return self._failure_sync.do(lambda: [self._pack(microbatch) for microbatch in microbatches])

    def _result(self, output: OutputCollector) -> ForwardBackwardOutput:
        if self.hooks.after is None:
            return output.result()
        return self._failure_sync.do(lambda: output.result(self.hooks.after))

    def _pack(self, microbatch: Microbatch) -> PackedRow | None:
        if microbatch and self.hooks.before is not None:
            expected = [len(datum.tokens) for datum in microbatch]
            microbatch = self.hooks.before(microbatch)
            if (lengths := [len(datum.tokens) for datum in microbatch]) != expected:
                raise ValueError(f"hooks.before returned datums of {lengths} tokens; {expected} are expected")
        return pack_row(microbatch, share_prefixes=self.shares_prefixes) if microbatch else None

    def _idle_row(self) -> PackedRow:
        """What a rank computes and discards while its peers have something to do."""
        return pack_row([IDLE_DATUM], share_prefixes=False)

    def _loss_inputs(self, row: PackedRow) -> LossInputs:
        return LossInputs(
            arrays={name: self._tensor(array) for name, array in row.loss_inputs.items()},
            datum_index=self._tensor(row.datum_index),
            num_datums=len(row.lengths),
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        if not math.isfinite(grad_scale):
            raise ValueError(f"grad_scale is {grad_scale}; it must be finite")
        if not self._detached_gradients and all(parameter.grad is None for parameter in self._parameters.values()):
            raise ValueError("optim_step was called without a gradient; call forward_backward first")
        with self._memory.phase("optim_step"), self._offload.resident(*PARTS):
            grad_norm = self._optimizer.step(params, grad_scale)
            skipped = not math.isfinite(grad_norm)
            if not skipped:
                self._version += 1
                self._refresh()
            self.zero_grad()
        return OptimStepOutput(
            policy_version=self._version,
            learning_rate=params.learning_rate,
            grad_norm=grad_norm,
            skipped=skipped,
            metrics=self._memory.take(),
        )

    def zero_grad(self) -> None:
        self._detached_gradients = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        chosen = {"model": model, "gradients": gradients, "optimizer": optimizer}
        self._offload.rest([part for part in PARTS if chosen[part]], device)

    @contextlib.contextmanager
    def train_mode(self) -> Generator[None]:
        with self._offload.resident(*PARTS), self._training(True):
            yield

    @contextlib.contextmanager
    def eval_mode(self) -> Generator[None]:
        with self._offload.resident("model"), self._training(False):
            yield

    @contextlib.contextmanager
    def _training(self, mode: bool) -> Generator[None]:
        before = self._model.training
        self._model.train(mode)
        try:
            yield
        finally:
            self._model.train(before)

    def _move(self, part: Part, device: torch.device) -> None:
        """Takes one part of the state to a device. A parameter has its gradient attached while both are on one."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._detached_gradients[name] = parameter.grad
                parameter.grad = None
        places = {each: self._offload.device_of(each) for each in PARTS} | {part: device}
        if part == "model":
            self._move_model(device)
        elif part == "gradients":
            self._detached_gradients = {name: grad.to(device) for name, grad in self._detached_gradients.items()}
        else:
            self._optimizer.to(device)
        if places["model"] == places["gradients"]:
            for name, grad in self._detached_gradients.items():
                self._parameters[name].grad = grad
            self._detached_gradients = {}
        if device != self._device:
            torch.cuda.empty_cache()  # what is offloaded is for others to use

    def _move_model(self, device: torch.device) -> None:
        """Takes the parameters, which have no gradients now, to a device."""
        if self._mixed_precision is not None:
            self._mixed_precision.to(device, self._device)
        else:
            self._reshard()
            self._model.to(device)

    @contextlib.contextmanager
    def _gradient_restored_on_failure(self) -> Generator[None]:
        """Accumulates the block's gradient apart and adds it to what was there only when the block succeeds."""
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        self.zero_grad()
        try:
            yield
        except BaseException:
            self._model.zero_grad(set_to_none=True)
            for name, parameter in self._parameters.items():
                parameter.grad = before[name]
            self._reshard()
            raise
        for name, parameter in self._parameters.items():
            earlier = before[name]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)

    def _reshard(self) -> None:
        """Frees gathered parameters that no backward pass will free, lest they outlive the next optimizer step."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _refresh(self) -> None:
        """Lets what is computed with follow the parameters, after these have changed."""
        if self._mixed_precision is not None and self._offload.device_of("model") == self._device:
            self._mixed_precision.refresh()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters.items()

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        size_bytes = 12 * sum(parameter.numel() for parameter in self._parameters.values())
        self._saver.save(
            path,
            self._state(optimizer=True),
            self._info("checkpoint"),
            size_bytes=size_bytes,
            asynchronous=asynchronous,
            keep_last=keep_last,
        )
        self._optimizer.forget_unused()

    def wait_for_checkpoint(self) -> None:
        self._saver.wait()

    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        self._saver.wait()
        with self._offload.resident("model", "optimizer"):
            state = self._state(optimizer=not weights_only)
            if weights_only or checkpoint.read_info(path).num_ranks != self._config.num_ranks:
                del state["rng"]
            info = checkpoint.load(path, state, self._model_info)
            self._take_over(state)
            if weights_only:
                self._optimizer.reset()
            self._optimizer.forget_unused()
            self._refresh()
        if "rng" in state:
            torch.set_rng_state(state["rng"][str(self._rank)])
        self.zero_grad()
        self._version = 0 if weights_only else info.policy_version
        return self._version

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize * sum(parameter.numel() for parameter in self._parameters.values())
        checkpoint.with_directory(
            path,
            self._info("export"),
            size_bytes,
            lambda partial: write_hf_directory(
                partial, self._config.model, self.hf_parameters(), dtype, self._config.head
            ),
        )

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        """Everything that a step depends on, in tensors that `torch.distributed.checkpoint` reads into in place."""
        return {
            "model": {name: parameter.detach() for name, parameter in self._parameters.items()},
            **({"optimizer": self._optimizer.state()} if optimizer else {}),
            "rng": {str(self._rank): torch.get_rng_state()},
        }

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Brings what a checkpoint filled in to where `_state` took copies from; here it is the state itself."""

    def _info(self, kind: checkpoint.Kind) -> checkpoint.CheckpointInfo:
        return checkpoint.CheckpointInfo(
            kind=kind, policy_version=self._version, model=self._model_info, num_ranks=self._config.num_ranks
        )

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
