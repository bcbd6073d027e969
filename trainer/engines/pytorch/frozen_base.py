"""A frozen model and the adapters over it.

`FrozenBase` holds the model. `AdapterEngine` is one adapter as an engine of its own, which shares the model and its
rows with other adapters. Every rank of a pipeline stage holds the stage's A and B whole. Its gradients are parts of a
sum over those ranks, be they data-, context- or tensor-parallel, so one sum at the end of each call makes them whole.
"""

import contextlib
import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from rl.data.packing import PackedRow
from rl.lora import LoRAConfig, tensor_name
from rl.losses import Loss
from rl.system.model_files import weight_files
from rl.types import ForwardBackwardOutput
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch, PeakMemory
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.hf_directory import write_hf_directory, write_peft_directory
from trainer.engines.pytorch.low_rank import (
    LowRank,
    adaptable_layers,
    adapted,
    all_names,
    check_memory,
    check_targets,
    merged_weight,
    new_parameters,
)
from trainer.engines.pytorch.row_runner import OutputCollector, RowRunner


class FrozenBase(Engine):
    """One rank of a frozen model. It scores, and makes adapters, which train."""

    def __init__(self, config: TrainerConfig, engine: Engine) -> None:
        """`engine` holds the model, frozen in `compute_dtype`. A collective, if there can be adapters.

        Adapters need a PyTorch engine; a model without them may be any engine's.
        """
        self._engine = engine
        self._adapters: dict[str, AdapterEngine] = {}
        self._config = config
        self._identity: Mapping[str, str] | None = None
        self._stage = _stage_group(config) if config.lora is not None else None

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def shares_prefixes(self) -> bool:
        return self._engine.shares_prefixes

    @property
    def memory(self) -> PeakMemory:
        return self._engine.memory

    def adapter(self, name: str, config: LoRAConfig) -> Engine:
        if self._config.lora is None:
            self._refuse("adapter")
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already; drop it first, or choose another name")
        assert isinstance(self._engine, TorchEngine), "only PyTorch engines have `trains_adapters` in their rows"
        AdapterEngine.check(self._engine, config)
        self._identity = self._identity or base_identity(self._config.model)
        self._adapters[name] = AdapterEngine(self._engine, config, self._identity, self._stage)
        return self._adapters[name]

    def drop_adapter(self, name: str) -> None:
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}; there are {sorted(self._adapters)}")
        self._adapters.pop(name).close()

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        return self._engine.forward(microbatches, entropy=entropy)

    def forward_backward(self, *_: object, **__: object) -> NoReturn:
        self._refuse("forward_backward")

    def optim_step(self, *_: object, **__: object) -> NoReturn:
        self._refuse("optim_step")

    def zero_grad(self) -> None:
        """Does nothing, because there is no gradient."""

    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        self._engine.to(device, model=model, gradients=gradients, optimizer=optimizer)

    def train_mode(self) -> AbstractContextManager[None]:
        return self._engine.train_mode()

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._engine.eval_mode()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.hf_parameters()

    def save_checkpoint(self, *_: object, **__: object) -> NoReturn:
        self._refuse("save_checkpoint")

    def wait_for_checkpoint(self) -> None:
        """Does nothing, because none is written."""

    def load_checkpoint(self, *_: object, **__: object) -> NoReturn:
        self._refuse("load_checkpoint")

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        self._engine.export_hf(path, dtype)

    def export_peft(self, *_: object, **__: object) -> NoReturn:
        self._refuse("export_peft")

    def _refuse(self, verb: str) -> NoReturn:
        if self._config.lora is None:
            raise ValueError(f"{verb}: the model is frozen; without TrainerConfig.frozen, it is trained")
        raise ValueError(
            f"{verb}: the model is frozen (TrainerConfig.lora); call it on an adapter, which `adapter` makes"
        )


def _stage_group(config: TrainerConfig) -> dist.ProcessGroup | None:
    """The ranks that hold the same layers as this one, which are consecutive, or None if there is no other."""
    size = config.num_ranks // config.pipeline_parallel
    if size == 1:
        return None
    if config.pipeline_parallel == 1:
        return dist.group.WORLD
    group: Any = dist.new_subgroups(size)[0]
    return group


class AdapterEngine(TorchEngine):
    """One rank's part of an adapter."""

    def __init__(
        self, base: TorchEngine, config: LoRAConfig, base_identity: Mapping[str, str], stage: dist.ProcessGroup | None
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
        for name, layer in self._layers.items():
            for grad in (each.grad for each in self._low_ranks[name][:2] if each.grad is not None):
                grad.div_(layer.num_alike)
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

    def accumulate(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        with self._engine.in_use():
            self._rows.accumulate(rows, loss, output)
        self._engine.sum_gradients()

    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        with self._engine.in_use():
            self._rows.forward(rows, output, entropy=entropy)

    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        return self._rows.shared_output(output)


def base_identity(path: Path) -> Mapping[str, str]:
    """The name of a model's directory and a hash of its weights, which differs between models of the same shape.

    The hash is of the tensors' names and shapes, and of the first and the middle row of each tensor in float32. It
    depends neither on the layout nor on how the files are split, and a copy of the model in a wider dtype has the same.
    A collective: rank 0 reads the files.
    """
    return checkpoint.on_rank_0(lambda: {"name": path.resolve().name, "weights": _hash(path)})


def _hash(path: Path) -> str:
    samples: dict[str, bytes] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                part = tensors.get_slice(name)
                shape: list[int] = part.get_shape()
                middle = shape[0] // 2
                rows = torch.cat([part[:1], part[middle : middle + 1]])
                samples[name] = str(shape).encode() + rows.float().numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()[:16]
