"""Builds, parallelizes and loads a torchtitan model, in the order that torchtitan needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from rl.system.decoders import DecoderConfig
from trainer.config import TrainerConfig
from trainer.engines.pytorch.low_rank import Adaptable, freeze
from trainer.engines.pytorch.pipeline import Pipeline
from trainer.engines.pytorch.ranks import DTYPES
from trainer.engines.titan._compat import without_torchtitans_loop
from trainer.engines.titan.model.attention import choose_inner_attention
from trainer.engines.titan.model.specs import Policy, load_weights, share_rope_cache


class BuiltModel(NamedTuple):
    """A model with its weights loaded, in float32 or frozen in `compute_dtype`, sharded according to the layout."""

    parts: Sequence[Policy]
    """The whole model as one part, or this rank's pipeline stages in order."""
    context_mesh: DeviceMesh | None
    """The ranks of this rank's context-parallel group, if there is such parallelism."""
    pipeline: Pipeline | None


def build_model(config: TrainerConfig, shape: DecoderConfig, device: torch.device) -> BuiltModel:
    """Builds this rank's part of the model in `config.model`."""
    spec = resolve_name(shape.spec)(shape, config.head, choose_inner_attention(device))
    _convert(config, spec)
    context_mesh: DeviceMesh | None = None
    pipeline: Pipeline | None = None
    if config.num_ranks > 1:
        dims = _parallel_dims(config)
        context_mesh = dims.get_optional_mesh("cp")
        parts = _build_parallel(config, spec, dims, device)
        if (mesh := dims.get_optional_mesh("pp")) is not None:
            tensor_mesh = dims.get_optional_mesh("tp")
            pipeline = Pipeline(config, parts, shape.dim, device, mesh, tensor_mesh)
    else:
        parts = [_built(config, spec)]
        if (checkpointing := _activation_checkpointing(config)) is not None:
            checkpointing.build().apply(parts[0])
        if (compiling := _compile_config(config, device)).enable:
            apply_compile(parts[0], compile_config=compiling, parallel_dims=ParallelDims(1, 1, 1, 1, 1, 1, 1))
    decoders = [part for part in parts if isinstance(part, Policy)]
    assert len(decoders) == len(parts)
    with torch.no_grad():
        for decoder in decoders:
            with _WithoutReferences():
                decoder.to_empty(device=device)
            decoder.init_states(buffer_device=None)
        load_weights(decoders, config.model)
    if config.compile and device.type == "cpu":
        _compile_around_attention(decoders)
    share_rope_cache(decoders)
    name_adaptable(decoders)
    return BuiltModel(decoders, context_mesh, pipeline)


def _built(config: TrainerConfig, spec: ModelSpec) -> Decoder:
    """The model on the meta device. It is frozen here, because FSDP must find parameters in their final dtype."""
    with torch.device("meta"), _WithoutReferences():
        model = spec.model.build()
    assert isinstance(model, Decoder)
    if config.is_frozen:
        freeze(model, DTYPES[config.compute_dtype])
    return model


class _WithoutReferences(TorchFunctionMode):
    """Builds a model on the meta device, and gives it memory, without what PyTorch computes there in Python.

    Those reference implementations import sympy, which takes a second. Initial values have no meaning on the meta
    device.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[object], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return options["tensor"] if "tensor" in options else args[0]
        if func is torch.empty_like and not isinstance(args[0], DTensor):
            return torch.empty(args[0].shape, dtype=args[0].dtype, **options)
        return func(*args, **options)


def _convert(config: TrainerConfig, spec: ModelSpec) -> None:
    """Puts in layers that can be adapted, or torchtitan's float8 ones, which need no call after an optimizer step."""
    if config.lora is not None:
        make_adaptable(spec)
    if config.float8 != "none":
        assert isinstance(spec.model, Decoder.Config)
        float8 = Float8LinearConverter.Config(
            recipe_name=config.float8, filter_fqns=["lm_head", "router.gate"], model_compile_enabled=config.compile
        )
        spec.model = float8.build().convert(spec.model)


def _compile_config(config: TrainerConfig, device: torch.device) -> CompileConfig:
    """torchtitan compiles whole layers, which attention over packed rows does not allow on the CPU."""
    return CompileConfig(enable=config.compile and device.type != "cpu", components=["model"])


def _compile_around_attention(decoders: Sequence[Decoder]) -> None:
    """Compiles each layer up to and after the attention kernel, inside the wrappers that recompute or shard it."""
    for decoder in decoders:
        for module in decoder.modules():
            if isinstance(module, TransformerBlock):
                module.compile()


@dataclass
class _RuntimeConfig:
    """The part of torchtitan's trainer configuration that a model reads."""

    parallelism: ParallelismConfig


def _parallelism(config: TrainerConfig) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_replicate_degree=config.data_parallel_replicate,
        data_parallel_shard_degree=config.data_parallel_shard,
        tensor_parallel_degree=config.tensor_parallel,
        enable_sequence_parallel=config.sequence_parallel,
        context_parallel_degree=config.context_parallel,
        pipeline_parallel_degree=config.pipeline_parallel,
        pipeline_parallel_schedule=config.pipeline_schedule,
        expert_parallel_degree=config.expert_parallel,
        # With more than one rank, torchtitan's default backend needs functions that torch 2.13 lacks.
        spmd_backend="partial_dtensor",
    )


def _parallel_dims(config: TrainerConfig) -> ParallelDims:
    parallelism = _parallelism(config)
    set_spmd_backend(parallelism.spmd_backend)  # modules look it up while they run
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    return dims


def _build_parallel(
    config: TrainerConfig, spec: ModelSpec, dims: ParallelDims, device: torch.device
) -> Sequence[nn.Module]:
    parallelism = _parallelism(config)
    with without_torchtitans_loop():
        spec.model.update_from_config(config=_RuntimeConfig(parallelism))
    model = _built(config, spec)
    options: dict[str, Any] = {
        "parallel_dims": dims,
        # In a pipeline the batch size is the number of micro-batches of a schedule that torchtitan builds here, which
        # is never used: `Pipeline` makes its own for every call.
        "training": TrainingConfig(mixed_precision_param=config.compute_dtype, local_batch_size=config.num_stages),
        "parallelism": parallelism,
        "compile_config": _compile_config(config, device),
        "ac_config": _activation_checkpointing(config),
        "dump_folder": "",
    }
    if config.pipeline_parallel > 1:
        assert spec.pipelining_fn is not None
        _, parts, _, _ = spec.pipelining_fn(
            model, device=device, model_config=spec.model, parallelize_fn=spec.parallelize_fn, loss_fn=None, **options
        )
    else:
        spec.parallelize_fn(model, **options)
        parts = [model]
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # Gradients are sums over ranks, and gloo has no reduction that also scales.
                module.set_force_sum_reduction_for_comms(True)
    return parts


def _activation_checkpointing(config: TrainerConfig) -> ActivationCheckpointing.Config | None:
    if config.activation_checkpointing == "none":
        return None
    return FullAC.Config() if config.activation_checkpointing == "full" else SelectiveAC.Config()


class AdaptedLinear(Adaptable, Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """torchtitan's `Linear`, adaptable."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""


def make_adaptable(spec: ModelSpec) -> None:
    """Replaces the projections of attention and of dense feed-forward networks, as torchtitan's converters do."""
    assert isinstance(spec.model, Decoder.Config)
    # Generators adapt no feed-forward network of a mixture: neither experts, nor shared ones, nor dense layers.
    where = ".attention." if any(layer.moe for layer in spec.model.layers) else ""
    for name, config, parent, attribute in list(spec.model.traverse(Linear.Config)):
        if type(config) is not Linear.Config or where not in name:
            continue
        adapted = AdaptedLinear.Config(**{f.name: getattr(config, f.name) for f in fields(config) if f.init})
        assert isinstance(attribute, str)  # the list of layers holds no projections
        setattr(parent, attribute, adapted)


def name_adaptable(parts: Sequence[Policy]) -> None:
    """Gives every layer that can be adapted its Hugging Face name."""
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, Adaptable):
                module.hf_module = part.hf_name(f"{name}.weight").removesuffix(".weight")
