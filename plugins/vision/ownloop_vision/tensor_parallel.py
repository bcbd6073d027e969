"""Tensor parallelism of the language model of vision-language models, by torch's `parallelize_module`.

    tokens ----- embedding, by words ----+
    images ----- tower, whole -----------+--> layers: heads and feed-forward columns --> logits, by words

Ranks of a group have the same tokens and images. Each computes all images, so that features need not be exchanged; a
tower that is trained is sharded over all ranks by FSDP. Between layers, hidden states are whole on every rank.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.engines.pytorch.low_rank import Adaptable

_LANGUAGE = "language_model"
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
_OF_HEADS = ("q_norm", "k_norm")


def split(model: Any, mesh: DeviceMesh) -> Sequence[nn.Module]:
    """The `rl.system.hf_config.VisionParts.split` of Qwen2.5-VL, Qwen3-VL and Gemma 3."""
    base = model.base_model
    for name, module in base.get_submodule(_LANGUAGE).named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            parallelize_module(module, mesh, _style(name.rpartition(".")[2]))
    # As the embedding's, so that the two can be tied once the weights have memory.
    parallelize_module(model.get_output_embeddings(), mesh, ColwiseParallel())
    tower = [part for name, part in base.named_children() if name != _LANGUAGE]
    for layer in (each for part in tower for each in part.modules() if isinstance(each, Adaptable)):
        layer.num_alike = mesh.size()
    trained = [part for part in tower if any(parameter.requires_grad for parameter in part.parameters())]
    blocks = [each for part in trained for each in part.modules() if type(each).__name__ in model._no_split_modules]
    return [*blocks, *trained]


def _style(kind: str) -> ParallelStyle:
    """How ranks share a module of the language model with this name."""
    if kind in _COLUMNS:
        return ColwiseParallel()
    if kind in _ROWS:
        return RowwiseParallel()
    if kind == "embed_tokens":
        return RowwiseParallel(input_layouts=Replicate())
    # Each rank has its own heads. Which dimension they are in depends on the family, and a norm does not care.
    return _Whole(Shard(1) if kind in _OF_HEADS else Replicate())


class _Whole(ParallelStyle):
    """Every rank holds the whole parameters. Where the ranks' inputs differ, gradients are summed over them."""

    def __init__(self, inputs: Placement) -> None:
        """`inputs` says how the ranks' inputs are related."""
        super().__init__()
        self._inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = (self._enter, _leave)  # torch's annotations say that they return nothing
        return distribute_module(module, device_mesh, None, *hooks)

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        del module
        return tuple(DTensor.from_local(each, mesh, [self._inputs], run_check=False) for each in inputs)


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    del module, mesh
    return output.to_local()
