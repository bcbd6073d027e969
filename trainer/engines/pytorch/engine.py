"""What every engine on PyTorch shares: accumulating gradients, surviving failures, steps, checkpoints and exports.

An engine of this kind brings a model, its parameters by Hugging Face name and a `RowRunner` that computes packed rows.
How the model is built, sharded and named is the engine's own business.

Calls go one way: the public methods are defined here and call the hooks at the end of the class. A subclass overrides
hooks, and no hook calls a public method.
"""

import contextlib
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl.data.packing import ModelFlops, PackedRow, pack_row
from rl.losses import Loss
from rl.system.ranks import own_rank
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch, PeakMemory
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.checkpoint import CheckpointSaver
from trainer.engines.pytorch.engine_state import (
    PARTS,
    Gradients,
    HostMemory,
    MasterWeights,
    MixedPrecision,
    Offload,
    Part,
)
from trainer.engines.pytorch.hf_directory import itself, moment_views, parameter_views, write_hf_directory
from trainer.engines.pytorch.optimizer import Optimizer
from trainer.engines.pytorch.ranks import DTYPES
from trainer.engines.pytorch.row_runner import OutputCollector, RowRunner


class TorchEngine(Engine):
    """One rank of a model whose gradients autograd accumulates in `parameter.grad`."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        model_info: Mapping[str, object],
        device: torch.device,
        rows: RowRunner,
        *,
        replicas: int = 1,
        masters: MasterWeights | None = None,
    ) -> None:
        """`parameters` are float32, by Hugging Face name, in the order of `model`; `model_info` goes into checkpoints.

        A parameter that is not a DTensor is held alike by `replicas` ranks. With one rank and a compute dtype other
        than float32, the parameters of `model` become copies in that dtype, and the engine keeps the float32 ones;
        a frozen model is in that dtype already, and its layers cast an adapter's parameters. With `masters`, these are
        the parameters, and the model has copies.
        """
        self._config = config
        self._model = model
        self._model_info = model_info
        self._device = device
        self._rows = rows
        self._failure_sync = rows.failure_sync
        if masters is None and config.num_ranks == 1 and config.compute_dtype != "float32" and not config.is_frozen:
            masters = mixed_precision = MixedPrecision(parameters.values(), DTYPES[config.compute_dtype])
            parameters = dict(zip(parameters, mixed_precision.master_weights, strict=True))
        self._masters = masters
        self._parameters = parameters
        self._gradients = Gradients(parameters)
        self._optimizer = Optimizer(parameters, replicas, DTYPES[config.moments_dtype])
        self._offload = Offload(device, self._move)
        self._host = HostMemory()
        self._memory = PeakMemory(device)
        self._flops = ModelFlops.of(config.model, config.head, frozen=config.is_frozen)
        self._saver = CheckpointSaver()
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def shares_prefixes(self) -> bool:
        return False

    @property
    def memory(self) -> PeakMemory:
        return self._memory

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        output = OutputCollector(self._memory, self._config.head, entropy=False, flops=self._flops.training)
        with (
            self._memory.phase("forward_backward"),
            self._offload.resident("model", "gradients"),
            self._gradient_restored_on_failure(),
        ):
            self._rows.accumulate(self._packed(microbatches), loss, output)
            self._reduce_gradients()
            result = output.result()
        return self._rows.shared_output(result)

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        output = OutputCollector(self._memory, self._config.head, entropy=entropy)
        with self._memory.phase("forward"), self.eval_mode(), torch.no_grad():
            self._rows.forward(self._packed(microbatches), output, entropy=entropy)
            self._reshard()
            result = output.result()
        return self._rows.shared_output(result)

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        if not math.isfinite(grad_scale):
            raise ValueError(f"grad_scale is {grad_scale}; it must be finite")
        if not self._gradients.exist:
            raise ValueError("optim_step was called without a gradient; call forward_backward first")
        self._optimizer.check(params, self._device)
        # Moments that rest on the host come to the device in pieces, so that they never take their whole room there.
        fetch_to = None if self._offload.device_of("optimizer") == self._device else self._device
        with self._memory.phase("optim_step"), self._offload.resident(*(PARTS[:2] if fetch_to else PARTS)):
            if fetch_to is None:  # before the gradient is changed: either every rank has memory for moments, or none
                self._failure_sync.run(self._optimizer.state)
            grad_norm = self._optimizer.step(params, grad_scale, fetch_to=fetch_to)
            skipped = not math.isfinite(grad_norm)
            if not skipped:
                self._version += 1
                self._refresh_compute_copies()
            self.zero_grad()
        return OptimStepOutput(
            policy_version=self._version,
            learning_rate=params.learning_rate,
            grad_norm=grad_norm,
            skipped=skipped,
            metrics=self._memory.take(),
        )

    def zero_grad(self) -> None:
        self._gradients.clear()

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

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._named_parameters()

    @property
    def frozen_names(self) -> Collection[str]:
        return self._buffers().keys()

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        size_bytes = 12 * sum(p.numel() for p in self._parameters.values())  # parameters and moments, 4 bytes each
        state, info = self._state(optimizer=True), self._info("checkpoint")
        self._saver.save(path, state, info, size_bytes=size_bytes, asynchronous=asynchronous, keep_last=keep_last)
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
            self._restore_state(state)
            if weights_only:
                self._optimizer.reset()
            self._optimizer.loaded()
            self._refresh_compute_copies()
        if "rng" in state:
            torch.set_rng_state(state["rng"][str(own_rank())])
        self.zero_grad()
        self._version = 0 if weights_only else info.policy_version
        return self._version

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize * sum(parameter.numel() for parameter in self._parameters.values())

        def write(partial: Path) -> None:
            write_hf_directory(partial, self._config.model, self.hf_parameters(), dtype, self._config.head)

        checkpoint.with_directory(path, self._info("export"), size_bytes, write)

    def _packed(self, microbatches: Sequence[Microbatch]) -> list[PackedRow | None]:
        """Packs each micro-batch into a row; an empty one becomes None."""
        return self._failure_sync.run(lambda: [self._pack_row(each) if each else None for each in microbatches])

    @contextlib.contextmanager
    def _gradient_restored_on_failure(self) -> Generator[None]:
        """Accumulates the block's gradient apart from the earlier one, and adds the two once the block succeeds.

        A sum in floating point cannot be undone, so the second and later calls of a step hold two gradients.
        """
        earlier = self._gradients.attached()
        self.zero_grad()
        try:
            yield
        except BaseException:
            self._model.zero_grad()
            self.zero_grad()
            self._gradients.restore(earlier)
            self._reshard()
            raise
        self._gradients.add(earlier)

    @contextlib.contextmanager
    def _training(self, mode: bool) -> Generator[None]:
        before = self._model.training
        self._model.train(mode)
        try:
            yield
        finally:
            self._model.train(before)

    def _move(self, part: Part, device: torch.device) -> None:
        """Moves one part of the state to a device."""
        self._gradients.detach()
        places = {each: self._offload.device_of(each) for each in PARTS} | {part: device}
        if part == "gradients":
            self._gradients.to(device)
        elif part == "optimizer":
            self._optimizer.to(device)
        elif self._masters is not None:
            self._masters.to(device, self._device)
        else:
            self._reshard()
            self._move_model(device)
        if places["model"] == places["gradients"]:
            self._gradients.attach()
        if device != self._device:
            torch.cuda.synchronize()  # the host may read its copies now
            torch.cuda.empty_cache()  # state is offloaded to leave the memory to other processes

    def _refresh_compute_copies(self) -> None:
        """Recasts the compute copies after the master weights changed."""
        if self._masters is not None and self._offload.device_of("model") == self._device:
            self._masters.refresh()

    def _info(self, kind: checkpoint.Kind) -> checkpoint.CheckpointInfo:
        return checkpoint.CheckpointInfo(
            kind=kind, policy_version=self._version, model=self._model_info, num_ranks=self._config.num_ranks
        )

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Hook: as `Engine.hf_parameters`."""
        for name, parameter in self._parameters.items():
            yield from parameter_views(self._views, name, parameter)
        yield from self._buffers().items()

    def _views(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Hook: a parameter, or a tensor of its shape, as views by the names that all engines use."""
        return itself(name, tensor)

    def _buffers(self) -> Mapping[str, Tensor]:
        """Hook: the weights that no step changes and every rank holds whole, by Hugging Face name."""
        return {}

    def _reduce_gradients(self) -> None:
        """Hook: sums a call's gradients over ranks, if the backward pass has not done so. A collective."""

    def _reshard(self) -> None:
        """Hook: frees gathered parameters that no backward pass will free, so that no later step uses stale ones."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _pack_row(self, microbatch: Microbatch) -> PackedRow:
        """Hook: packs the datums of a micro-batch into a row, which the engine's model computes."""
        shares = self.shares_prefixes
        share_opening = shares and self._config.context_parallel == 1  # elsewhere a document's keys are adjacent
        return pack_row(microbatch, share_prefixes=shares, share_opening=share_opening)

    def _move_model(self, device: torch.device) -> None:
        """Hook: moves the parameters, which are resharded and have no gradients now, to a device."""
        self._model._apply(self._host.mover(device))  # pyright: ignore[reportPrivateUsage] - `to`, by another copy

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        """Hook: the state that a step depends on, in tensors that a checkpoint can be loaded into in place."""
        model = {name: parameter.detach() for name, parameter in self._parameters.items()}
        # By the names that all engines use, so that each of them can resume from the checkpoint.
        state: dict[str, Any] = {
            "model": {**dict(part for named in model.items() for part in self._views(*named)), **self._buffers()},
            "rng": {str(own_rank()): torch.get_rng_state()},
        }
        if optimizer:
            moments = self._optimizer.state().items()
            state["optimizer"] = dict(part for named in moments for part in moment_views(self._views, *named))
        return state

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        """Hook: copies loaded tensors into the live state. Here `_state` returns the live tensors themselves."""
