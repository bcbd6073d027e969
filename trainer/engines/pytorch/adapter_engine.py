"""An adapter over a frozen model as an engine of its own, which shares the model and its rows with other adapters.

Every rank of a pipeline stage holds the stage's A and B whole. Its gradients are parts of a sum over those ranks, be
they data-, context- or tensor-parallel, so one sum at the end of each call makes them whole.
"""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.data.packing import PackedRow
from rl.lora import LoRAConfig, tensor_name
from rl.losses import Loss
from rl.types import ForwardBackwardOutput
from trainer.engines.base import Microbatch
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.adapter_parameters import (
    all_names,
    check_memory,
    check_targets,
    merged_weight,
    new_parameters,
)
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.export import write_hf_directory, write_peft_directory
from trainer.engines.pytorch.low_rank import LowRank, adaptable_layers, adapted
from trainer.engines.pytorch.outputs import OutputCollector
from trainer.engines.pytorch.row_runner import RowRunner


class AdapterEngine(TorchEngine):
    """One rank's part of an adapter."""

    def __init__(
        self,
        base: TorchEngine,
        config: LoRAConfig,
        base_identity: Mapping[str, str],
        stage: dist.ProcessGroup | None,
    ) -> None:
        """A new adapter over `base`, whose model is frozen. `base_identity` goes into checkpoints.

        `stage` are the ranks that hold the same layers, or None if this rank alone holds its layers.
        """
        self._base = base
        self._lora = config
        self._stage = stage
        layers = adaptable_layers(base._model)
        self._layers = {name: layer for name, layer in layers.items() if config.adapts(name)}
        parameters = new_parameters(config, self._layers, base._device)
        self._low_ranks = {
            name: LowRank(parameters[tensor_name(name, "A")], parameters[tensor_name(name, "B")], config.scale)
            for name in self._layers
        }
        shape = {key: value for key, value in asdict(config).items() if key != "seed"}
        super().__init__(
            base._config,
            nn.ParameterList(parameters.values()),
            parameters,
            {**base._model_info, "lora": shape, "base": dict(base_identity)},
            base._device,
            _AdaptedRows(self, base._rows),
            replicas=1 if stage is None else stage.size(),
        )

    @staticmethod
    def check(base: TorchEngine, config: LoRAConfig) -> None:
        """Raises ValueError, on every rank, if the model lacks what is to be adapted or memory is short."""
        layers = adaptable_layers(base._model)
        names = all_names(layers)

        def check() -> None:
            has_experts = any("experts" in name for name, _ in base._model.named_modules())
            check_targets(config, names, has_experts=has_experts)
            if not any(map(config.adapts, layers)):
                raise ValueError(
                    "LoRAConfig adapts nothing of one of the pipeline's stages; with TrainerConfig.pipeline_parallel "
                    "above 1, train_attn or train_mlp must be True"
                )
            check_memory(config, layers, base._device)

        base._failure_sync.run(check)

    @property
    def shares_prefixes(self) -> bool:
        return self._base.shares_prefixes

    def _pack_row(self, microbatch: Microbatch) -> PackedRow:
        return self._base._pack_row(microbatch)

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Within the block, the model is on the device and computes with this adapter."""
        with self._base._offload.resident("model"), adapted(self._layers, self._low_ranks):
            yield

    def sum_gradients(self) -> None:
        """Sums the gradients of this call over the ranks that hold the same layers. A collective of them."""
        if self._stage is None:
            return
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self._stage)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize * sum(parameter.numel() for parameter in self._base._parameters.values())
        config = self._config
        checkpoint.with_directory(
            path,
            self._info("export"),
            size_bytes,
            lambda partial: write_hf_directory(
                partial, config.model, self._merged(), dtype, config.head, untied=self._lora.train_unembed
            ),
        )

    def export_peft(self, path: Path, dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize * sum(parameter.numel() for parameter in self._parameters.values())
        checkpoint.with_directory(
            path,
            self._info("export"),
            size_bytes,
            lambda partial: write_peft_directory(
                partial, self._config.model, self._parameters.items(), dtype, self._lora
            ),
        )

    def close(self) -> None:
        """Frees what would outlive this object, once its checkpoint is written. A collective."""
        self._saver.close()

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters with the adapter's products added, as float32. A tied head becomes one of its own."""
        missing = {f"{name}.weight": low_rank for name, low_rank in self._low_ranks.items()}
        for name, parameter in self._base._named_parameters():
            low_rank = missing.pop(name, None)
            yield name, parameter if low_rank is None else merged_weight(parameter, low_rank)
        for name, low_rank in missing.items():
            weight = self._layers[name.removesuffix(".weight")].weight
            yield name, merged_weight(weight, low_rank)

    @contextlib.contextmanager
    def _training(self, mode: bool) -> Generator[None]:
        with self._base._offload.resident("model"), self._base._training(mode):
            yield

    def _reshard(self) -> None:
        self._base._reshard()


class _AdaptedRows(RowRunner):
    """The rows of the frozen model, computed with an adapter."""

    def __init__(self, engine: AdapterEngine, rows: RowRunner) -> None:
        self._engine = engine
        self._rows = rows
        self.failure_sync = rows.failure_sync

    def forward_backward(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        with self._engine.in_use():
            self._rows.forward_backward(rows, loss, output)
        self._engine.sum_gradients()

    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        with self._engine.in_use():
            self._rows.forward(rows, output, entropy=entropy)

    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        return self._rows.shared_output(output)
