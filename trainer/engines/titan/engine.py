"""The torchtitan engine: torchtitan's model, parallelized by torchtitan, driven by our loop.

With more than one rank torchtitan's `parallelize_fn` applies tensor parallelism, activation checkpointing and FSDP2.
With one rank nothing is sharded and `MasterWeights` does the mixed precision. Pipeline, context and expert parallelism
are not offered.
"""

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rl.losses import Loss, LossInputs
from rl.packing import PackedRow, pack_row
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from trainer import checkpoint
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch, PeerError
from trainer.engines.hf_config import read_hf_config
from trainer.engines.masters import MasterWeights
from trainer.engines.optimizer import Optimizer
from trainer.engines.outputs import IDLE_DATUM, OutputCollector
from trainer.engines.titan.attention import attention_masks, shares_prefixes
from trainer.engines.titan.build import DTYPES, build_model, choose_device, init_process_group
from trainer.engines.titan.models import hf_parameters
from trainer.export import write_hf_directory


class TitanEngine(Engine):
    """One rank of a torchtitan model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        self._config = config
        self._hf_config = read_hf_config(config.model)
        self._device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, self._device)
        self._model = build_model(config, self._hf_config, self._device)
        parameters = dict(hf_parameters(self._model))
        dtype = DTYPES[config.compute_dtype]
        self._masters: MasterWeights | None = None
        if config.num_ranks == 1 and dtype != torch.float32:
            self._masters = MasterWeights(self._model, dtype)
            parameters = dict(zip(parameters, self._masters.masters, strict=True))
        self._parameters = parameters
        self._optimizer = Optimizer(parameters)
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def shares_prefixes(self) -> bool:
        return shares_prefixes(self._device)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        output = OutputCollector(entropy=False)
        with self._gradient_restored_on_failure():
            for microbatch in microbatches:
                row = self._pack(microbatch) if microbatch else None
                if row is not None and len(row.scored):
                    self._forward_backward_row(row, loss, output)
                    continue
                if row is not None:
                    output.add(row, None, None, {})
                if self._config.num_ranks > 1:
                    logprobs, _ = self._score(self._pack([IDLE_DATUM]), entropy=False)
                    self._tell_peers(failed=False)
                    (logprobs.sum() * 0.0).backward()
        return output.result()

    def _forward_backward_row(self, row: PackedRow, loss: Loss, output: OutputCollector) -> None:
        logprobs, entropy = self._score(row, entropy=loss.needs_entropy)
        inputs = LossInputs(
            arrays={name: self._tensor(array) for name, array in row.loss_inputs.items()},
            datum_index=self._tensor(row.datum_index),
            num_datums=len(row.lengths),
        )
        try:
            loss_sum, metrics = loss(logprobs, entropy, inputs)
        except Exception:
            self._tell_peers(failed=True)
            raise
        self._tell_peers(failed=False)
        output.add(row, logprobs, None, {"loss": loss_sum.detach(), **metrics})
        loss_sum.backward()

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        output = OutputCollector(entropy=entropy)
        with torch.no_grad():
            for microbatch in microbatches:
                row = self._pack(microbatch) if microbatch else None
                if row is not None and len(row.scored):
                    output.add(row, *self._score(row, entropy=entropy), {})
                    continue
                if row is not None:
                    output.add(row, None, None, {})
                if self._config.num_ranks > 1:
                    self._score(self._pack([IDLE_DATUM]), entropy=entropy)
        self._reshard()
        return output.result()

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs [S] and entropies [S] of a row's scored positions."""
        tokens, positions = self._tensor(row.tokens)[None], self._tensor(row.positions)[None]
        masks = attention_masks(self._model, positions, row.documents)
        return self._model(
            tokens,
            positions,
            masks,
            scored=self._tensor(row.scored),
            targets=self._tensor(row.loss_inputs["target_tokens"]),
            entropy=entropy,
        )

    def _pack(self, microbatch: Microbatch) -> PackedRow:
        return pack_row(microbatch, share_prefixes=self.shares_prefixes)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        if not math.isfinite(grad_scale):
            raise ValueError(f"grad_scale is {grad_scale}; it must be finite")
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise ValueError("optim_step was called without a gradient; call forward_backward first")
        grad_norm = self._optimizer.step(params, grad_scale)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._version += 1
            if self._masters is not None:
                self._masters.refresh()
        self.zero_grad()
        return OptimStepOutput(
            policy_version=self._version, learning_rate=params.learning_rate, grad_norm=grad_norm, skipped=skipped
        )

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

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
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _tell_peers(self, *, failed: bool) -> None:
        """Raises PeerError when the loss of another rank raised, so that none waits for it in the backward pass."""
        if self._config.num_ranks > 1:
            failures = torch.tensor(float(failed), device=self._device)
            dist.all_reduce(failures)
            if failures and not failed:
                raise PeerError("the loss raised on another rank")

    def _reshard(self) -> None:
        """Frees gathered parameters that no backward pass will free, lest they outlive the next optimizer step."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters.items()

    def save_checkpoint(self, path: Path) -> None:
        state = self._state()
        size_bytes = 12 * sum(parameter.numel() for parameter in self._parameters.values())
        checkpoint.save(path, state, self._info("checkpoint"), size_bytes=size_bytes)

    def load_checkpoint(self, path: Path) -> int:
        state = self._state()
        if checkpoint.read_info(path).num_ranks != self._config.num_ranks:
            del state["rng"]
        info = checkpoint.load(path, state, asdict(self._hf_config))
        if "rng" in state:
            torch.set_rng_state(state["rng"][str(self._rank)])
        self.zero_grad()
        self._version = info.policy_version
        if self._masters is not None:
            self._masters.refresh()
        return self._version

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize * sum(parameter.numel() for parameter in self._parameters.values())
        checkpoint.with_directory(
            path,
            self._info("export"),
            size_bytes,
            lambda partial: write_hf_directory(partial, self._config.model, self.hf_parameters(), dtype),
        )

    def _state(self) -> dict[str, Any]:
        """Everything that a step depends on, in tensors that `torch.distributed.checkpoint` reads into in place."""
        return {
            "model": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizer": self._optimizer.state(),
            "rng": {str(self._rank): torch.get_rng_state()},
        }

    def _info(self, kind: checkpoint.Kind) -> checkpoint.CheckpointInfo:
        return checkpoint.CheckpointInfo(
            kind=kind,
            policy_version=self._version,
            model=asdict(self._hf_config),
            num_ranks=self._config.num_ranks,
        )

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
