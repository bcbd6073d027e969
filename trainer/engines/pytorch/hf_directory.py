"""Reads the weights of a Hugging Face model directory, and writes a policy as one, or an adapter as one of PEFT.

Models hold the weights of a layer's experts as one parameter per projection, or even for two projections, while most
checkpoints name the weights of each expert. Here an expert is a view of the stack, so nothing is copied on load, push,
checkpoint or export.

The rotary frequencies that a directory's config.json asks for are computed here, as transformers computes them.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

from rl.lora import PEFT_PREFIX, LoRAConfig, adapted_modules
from rl.system.decoders import DecoderConfig, Llama3RopeScaling
from rl.system.hf_config import read_config, read_config_file, renamed, vision_of
from rl.system.model_files import other_files, weight_files
from rl.system.ranks import all_gather, own_rank
from rl.types import Head
from rl.weights.version import weight_dtype
from trainer.engines.pytorch.checkpoint import on_rank_0

VALUE_HEAD = "score.weight"
"""Name of a value head's parameter, [1, dim]. transformers' sequence classifiers use it, and reward models are
published and served by vLLM in that form."""
Views = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
"""A parameter, or a tensor of its shape, as views by the names of a checkpoint."""


def load_hf_weights(parameters: dict[str, torch.Tensor], path: Path) -> None:
    """Fills parameters in place from the files of a model directory. Each rank reads only its shards.

    A value head that the files lack becomes zero, so that all values begin at 0.

    Raises ValueError if there are no files, or if they lack a parameter or hold one of another shape.
    """
    reader = HuggingFaceStorageReader(str(path))
    reader.fs = _Listed(weight_files(path))
    stored = reader.read_metadata().state_dict_metadata
    if VALUE_HEAD in parameters and VALUE_HEAD not in stored:
        torch.nn.init.zeros_(parameters[VALUE_HEAD])
        parameters = {name: parameter for name, parameter in parameters.items() if name != VALUE_HEAD}
    for name, parameter in parameters.items():
        if name not in stored:
            raise ValueError(f"{path} holds no weight {name!r}")
        shape = tuple(getattr(stored[name], "size", ()))
        if shape != tuple(parameter.shape):
            raise ValueError(f"{path}: {name} has shape {shape}; config.json asks for {tuple(parameter.shape)}")
    dcp.load(dict(parameters), storage_reader=reader)


class _Listed(FileSystem):
    """Shows a reader some files of a directory: torch's reader would take every safetensors file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The files; `path` is not looked at."""
        del path
        return self._files


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """[head_dim / 2] float32 angles per position, the fastest first."""
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    return inv_freq if config.rope_scaling is None else scale_llama3(inv_freq, config.rope_scaling)


def scale_llama3(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretches long wavelengths by the factor, keeps short ones and interpolates in between (arXiv 2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def write_hf_directory(
    directory: Path,
    source: Path,
    parameters: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    head: Head,
    *,
    untied: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Fills `directory` with weights of `dtype` and with the configuration and tokenizer files of `source`.

    Weights of more than `shard_bytes` are split over several files.

    A model with a value head becomes a sequence classifier of transformers with one label, like reward models. With
    `untied`, the parameters hold an output projection of their own, even if that of `source` is the input embedding.
    A collective: the ranks gather one tensor after the other, and rank 0 keeps and writes them. What rank 0
    raises, every rank raises.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size_bytes = 0
    for name, tensor in _gathered(parameters, dtype):
        if own_rank() > 0:
            continue
        if size_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][name] = tensor
        size_bytes += tensor.nbytes

    def write() -> None:
        _write_shards(directory, shards)
        _copy_other_files(directory, source, dtype, head, untied=untied)

    on_rank_0(write)


def write_peft_directory(
    directory: Path,
    source: Path,
    parameters: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    config: LoRAConfig,
) -> None:
    """Fills `directory` with an adapter of the model `source`, as peft writes it. A collective, as above."""
    vision = vision_of(read_config(source))
    names = {PEFT_PREFIX + stored: PEFT_PREFIX + name for name, stored in vision.renamed.items()} if vision else {}
    tensors = {renamed(name, names): tensor for name, tensor in _gathered(parameters, dtype)}
    modules = adapted_modules(tensors)

    def write() -> None:
        save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(source),
            "r": config.rank,
            "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "fan_in_fan_out": False,
            "inference_mode": True,
            # A tower's layers may have the last parts of other layers' names.
            "target_modules": sorted(modules if vision else {module.rpartition(".")[2] for module in modules}),
        }
        (directory / "adapter_config.json").write_text(json.dumps(content, indent=2))

    on_rank_0(write)


def _gathered(parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every parameter of any rank whole on rank 0. On other ranks the contents of a tensor are undefined."""
    mine = dict(parameters)
    if not dist.is_initialized():
        yield from ((name, _whole(parameter, weight_dtype(name, dtype))) for name, parameter in mine.items())
        return
    shapes = all_gather({name: parameter.shape for name, parameter in mine.items()})
    holders = {name: rank for rank in reversed(range(len(shapes))) for name in shapes[rank]}
    for name, holder in sorted(holders.items()):
        # Every holder takes part in gathering a tensor; only the first of them sends it.
        cast = weight_dtype(name, dtype)
        full = _whole(mine[name], cast) if name in mine else torch.empty(shapes[holder][name], dtype=cast)
        if holder != 0 and own_rank() == holder:
            dist.send(full, dst=0)
        elif holder != 0 and own_rank() == 0:
            dist.recv(full, src=holder)
        yield name, full


def _whole(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = parameter.detach().to(dtype)
    full = cast.full_tensor() if isinstance(cast, DTensor) else cast
    return full.cpu().contiguous()


def _write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    metadata = {"format": "pt"}  # transformers refuses a file without it
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_other_files(directory: Path, source: Path, dtype: torch.dtype, head: Head, *, untied: bool) -> None:
    """Copies configuration, tokenizer and chat templates, but no weights, and records dtype and head in config.json."""
    for file in other_files(source):
        (directory / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, directory / file)  # not its mode: config.json is written again
    config = dict(read_config_file(source))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if head == "value":
        config["architectures"] = [_classifier(config["model_type"])]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    if untied:
        config["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _classifier(model_type: str) -> str:
    """The name of transformers' sequence classifier for a model type, as which an exported critic loads."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    names: dict[str, str] = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model_type not in names:
        raise ValueError(f"a critic of model_type {model_type!r} cannot be exported: transformers has no class for it")
    return names[model_type]


def itself(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The `Views` of a parameter that has the checkpoint's name and shape."""
    yield name, tensor


def parameter_views(views: Views, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a parameter by the names of a checkpoint. The gradient of a view, if any, is a view of the gradient."""
    grads = dict(views(name, parameter.grad)) if parameter.grad is not None else {}
    for part, view in views(name, parameter.detach()):
        if part == name:
            yield name, parameter
            return
        view.grad = grads.get(part)
        yield part, view


def moment_views(views: Views, name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yields an optimizer's state of a parameter, as `parameter_views` yields the parameter. Views share the step."""
    parts = {key: dict(views(name, state[key])) for key in ("exp_avg", "exp_avg_sq")}
    for part in parts["exp_avg"]:
        yield part, {"step": state["step"], **{key: of_key[part] for key, of_key in parts.items()}}


def unstacked(stack: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields index and weight of each expert of which this rank holds a part. The stack may be plain or sharded."""
    if not isinstance(stack, DTensor):
        yield from enumerate(stack.unbind(0))
        return
    mesh, placements = stack.device_mesh, stack.placements
    names = mesh.mesh_dim_names
    assert names is not None
    _, (first, *_) = compute_local_shape_and_global_offset(stack.shape, mesh, placements)
    # Mesh axes over which whole experts are distributed do not shard a single expert.
    within = [(axis, _within_expert(p)) for axis, p in zip(names, placements, strict=True) if not _cuts(p, 0)]
    for index, local in enumerate(stack.to_local().unbind(0), start=first):
        if not within:
            yield index, local
            continue
        submesh = mesh[tuple(axis for axis, _ in within)]
        shape = stack.shape[1:]
        yield (
            index,
            DTensor.from_local(
                local, submesh, [p for _, p in within], run_check=False, shape=shape, stride=(shape[1], 1)
            ),
        )


def _cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement shards that dimension."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _within_expert(placement: Placement) -> Placement:
    """The placement of one expert [., .] for a placement of the stack [E, ., .]."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim - 1)
    assert isinstance(placement, Replicate)
    return placement
