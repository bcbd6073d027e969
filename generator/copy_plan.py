"""Records once what vLLM's `load_weights` copies from a weight buffer, and repeats those copies at every later pull.

vLLM walks over hundreds of tensors, fuses and shards them, in Python, on one thread. All of that is the same for every
version, so the first pull's copies are written down, as pairs of views, and what packs weights for the CPU reads them
from the buffer where that is possible.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from generator._compat import pack, packed_experts, packed_layers
from rl.weights.copy_threads import Workers
from rl.weights.manifest import VersionRecord
from rl.weights.transport import WeightMemory

Operation = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Source:
    """A view of a buffer."""

    dtype: torch.dtype
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, memory: WeightMemory) -> torch.Tensor:
        return memory.data.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class CopyRecorder(TorchDispatchMode):
    """While active, notes what is copied out of a buffer."""

    def __init__(self, memory: WeightMemory) -> None:
        """The tensors to be copied are views of `memory`."""
        super().__init__()
        self._storage = memory.data.untyped_storage().data_ptr()
        self.copies: list[tuple[torch.Tensor, _Source]] = []
        self.complete = True
        """Whether everything taken from the buffer was copied as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._in_memory(args[1]):
            source: torch.Tensor = args[1]
            view = _Source(source.dtype, int(source.storage_offset()), tuple(source.shape), source.stride())
            self.copies.append((args[0], view))
        elif any(self._in_memory(value) for value in args) and not self._in_memory(result):
            self.complete = False
        return result

    def _in_memory(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == self._storage


class CopyPlan:
    """How a version laid out like the one recorded gets into the model."""

    def __init__(self, model: nn.Module, record: VersionRecord, recorder: CopyRecorder) -> None:
        """`recorder` was active while the model's `load_weights` took in `record`."""
        self._modules = tuple(model.modules())
        self._layout = record.layout
        self._addresses = _addresses(self._modules)
        self._usable = recorder.complete and all(destination.is_cpu for destination, _ in recorder.copies)
        layers = packed_layers(model)
        into: dict[int, list[tuple[torch.Tensor, _Source]]] = defaultdict(list)
        for destination, source in recorder.copies:
            into[_address(destination)].append((destination, source))
        packed = {id(layer) for layer in layers}
        plain = {
            _address(parameter)
            for module in self._modules
            for name, parameter in module.named_parameters(recurse=False)
            if id(module) not in packed or name != "weight"
        }
        self._packs: list[tuple[nn.Module, torch.Tensor | _Source]] = []
        for layer in layers:
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            whole = _as_one(weight, into[_address(weight)])
            self._packs.append((layer, whole or weight))
            if whole is not None and _address(weight) not in plain:
                del into[_address(weight)]  # nobody reads the plain weight then
        self._copies = [pair for pairs in into.values() for pair in pairs]
        self._experts = packed_experts(model)
        # What brings in a version, one stage after the other, for each buffer; it is gone with the buffer.
        self._stages: WeakKeyDictionary[WeightMemory, list[Sequence[Operation]]] = WeakKeyDictionary()

    def fits(self, record: VersionRecord) -> bool:
        """Whether it can be used for this version in the model as it is now."""
        return self._usable and record.layout == self._layout and _addresses(self._modules) == self._addresses

    def load(self, memory: WeightMemory, workers: Workers) -> None:
        """Brings what lies in `buffer` into the model."""
        stages = self._stages.get(memory)
        if stages is None:
            copies = workers.copies((destination, source.of(memory)) for destination, source in self._copies)
            packs = _packing((layer, s.of(memory) if isinstance(s, _Source) else s) for layer, s in self._packs)
            stages = self._stages[memory] = [copies, packs, self._experts]
        for operations in stages:
            workers.run(operations)


def pack_weights(model: nn.Module, workers: Workers) -> None:
    """Packs what was loaded, so that the next forward pass computes with it. Does nothing on a GPU."""
    workers.run(_packing((layer, cast(torch.Tensor, layer.weight)) for layer in packed_layers(model)))
    workers.run(packed_experts(model))


def _packing(layers: Iterable[tuple[nn.Module, torch.Tensor]]) -> list[Operation]:
    """What packs these layers with their new weights."""
    return [partial(pack, layer, weight) for layer, weight in sorted(layers, key=_size, reverse=True)]


def _size(packed: tuple[nn.Module, torch.Tensor]) -> int:
    return packed[1].nbytes


def _as_one(weight: torch.Tensor, copies: Sequence[tuple[torch.Tensor, _Source]]) -> _Source | None:
    """The one contiguous piece of a buffer that the copies into a weight fill it with, if it is one."""
    if not copies or not weight.is_contiguous():
        return None
    ordered = sorted(copies, key=lambda pair: pair[0].storage_offset())
    first = ordered[0][1].offset
    end = 0
    for destination, source in ordered:
        rows = torch.empty(source.shape, device="meta").stride()
        if (
            destination.storage_offset() - weight.storage_offset() != end
            or source.offset - first != end
            or source.dtype != weight.dtype
            or not destination.is_contiguous()
            or source.stride != rows
        ):
            return None
        end += destination.numel()
    return _Source(weight.dtype, first, tuple(weight.shape), weight.stride()) if end == weight.numel() else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(modules: Iterable[nn.Module]) -> list[int]:
    """Of the modules' own parameters. Takes a tenth of the time of `model.parameters()`, which looks for names."""
    return [p.data_ptr() for module in modules for p in vars(module)["_parameters"].values() if p is not None]
