"""The pulling side of weight synchronisation: loads a published version into a vLLM model of this process.

vLLM's own `load_weights` fuses and shards, so a tensor-parallel rank copies only its own part. All checks come before
the first copy, so a version of another model leaves the old weights as they are. The transport brings a version here,
and the engine decides when to load it.

    first pull     WeightLoader -> model.load_weights, hundreds of tensors one by one, in Python, on one thread;
                   CopyRecorder notes each copy out of weight memory as a pair of views
    later pulls    CopyPlan runs the same copies: on all threads or, for a model on a GPU, in one call

The copies are the same for every version of one layout. A weight that is packed for the CPU is packed straight from the
published memory if it lies there in one piece, which saves a copy.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from generator.cpu.weight_packing import absorbing, pack, pack_again, packed_in_place, packed_layers, plain_convolutions
from rl.checks import first_names
from rl.system.hf_config import trained_shapes
from rl.weights.memory import WeightBuffer
from rl.weights.shared_memory import Workers, copy, on_gpu
from rl.weights.version import VersionRecord, WeightsError, WeightsMismatchError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Backup = tuple[list[tuple[nn.Parameter, torch.Tensor]], list[tuple[nn.Module, Any]]]


class WeightLoader:
    """Loads published versions into one vLLM model."""

    def __init__(self, model: nn.Module, directory: Path, *, tied_embeddings: bool) -> None:
        """`directory` is where the model was loaded from: a version has to bring the tensors of its files.

        Raises ValueError for a model of experts that cannot be loaded into.
        """
        self._model = model
        self._dtype = next(model.parameters()).dtype
        self._expected = trained_shapes(directory)
        if tied_embeddings:
            self._expected.pop("lm_head.weight", None)  # some files repeat it; it is never published
        self._workers = Workers()
        self._plan: CopyPlan | None = None
        self.frozen_id = b""
        """The `frozen_id` of the version in the model; empty if the model may hold other frozen tensors."""
        packed_in_place(model)  # only to raise

    def check(self, record: VersionRecord) -> None:
        """Raises `WeightsMismatchError` if the version is not one of this model."""
        self.check_dtype(record)
        published = {spec.name: spec.shape for spec in record.manifest}
        both = published.keys() & self._expected.keys()
        problems = {
            "missing": self._expected.keys() - both,
            "not of this model": published.keys() - both,
            "of another shape": {
                f"{name} {published[name]} instead of {self._expected[name]}"
                for name in both
                if published[name] != self._expected[name]
            },
        }
        said = "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names)
        if said:
            raise WeightsMismatchError(f"version {record.version} does not fit this model; {said}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors and of its output projection, by their Hugging Face names."""
        embedding = next((s for name, s in self._expected.items() if name.endswith(".embed_tokens.weight")), None)
        return self._expected if embedding is None else {"lm_head.weight": embedding, **self._expected}

    def check_dtype(self, record: VersionRecord) -> None:
        """Raises `WeightsMismatchError` if the version was published in another dtype than this generator's."""
        if record.dtype != self._dtype:
            raise WeightsMismatchError(
                f"version {record.version} was published as {record.dtype}; this generator holds {self._dtype}"
            )

    def load_memory(self, memory: WeightBuffer, record: VersionRecord) -> None:
        """Copies the version in `memory` into the model. Raises as `load` does.

        The first call goes through vLLM and records its copies. Later calls repeat them, and leave frozen tensors out
        that the model has.
        """
        has_frozen, self.frozen_id = self.frozen_id == record.frozen_id, b""
        if self._plan is None or not self._plan.fits(record):
            with CopyRecorder(memory, record) as recorder:
                self._load((spec.name, memory.tensor(spec)) for spec in record.manifest)
            pack_weights(self._model, self._workers)  # from then on it is known of every layer whether it is packed
            self._plan = CopyPlan(self._model, record, recorder)
        else:
            self._plan.load(memory, self._workers, frozen=not has_frozen)
        self.frozen_id = record.frozen_id

    def load(self, tensors: NamedTensors) -> None:
        """Copies the tensors into the model. Raises `WeightsError` if a parameter of the model was left out.

        After any exception the model is a mixture of versions. It must not be used until a later call succeeds, or
        `restore` is called.
        """
        self.frozen_id = b""
        self._load(tensors)
        pack_weights(self._model, self._workers)

    def backup(self) -> Backup:
        """A copy of this rank's weights for `restore`, in the host's memory."""
        with torch.no_grad():
            parameters = [(p, p.detach().to("cpu", copy=True)) for p in self._model.parameters()]
        # Packed weights are replaced, never overwritten, so references to them are enough.
        return parameters, [(layer, vars(layer)["cpu_linear"]) for layer in packed_layers(self._model)]

    def restore(self, backup: Backup) -> None:
        """Brings back the weights of `backup`."""
        parameters, packed = backup
        with torch.no_grad():
            for parameter, old in parameters:
                parameter.copy_(old)
        for layer, cpu_linear in packed:
            object.__setattr__(layer, "cpu_linear", cpu_linear)

    def _load(self, tensors: NamedTensors) -> None:
        with torch.no_grad(), plain_convolutions(self._model):
            loaded: set[str] = self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        # vLLM puts adapters around the layers of the model, and leaves this out of the names that it returns.
        left = {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()} - loaded
        left = {name for name in left if not name.endswith((".W_UV", ".W_UK_T"))}  # made of others, see `absorbing`
        if left:
            raise WeightsError(f"vLLM loaded nothing into these parameters: {first_names(left)}")


Operation = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Source:
    """A view of weight memory, wherever that is mapped."""

    part: int
    """The index in `WeightBuffer.parts`."""
    dtype: torch.dtype
    offset: int
    """In elements of `dtype`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    frozen: bool = False
    """Whether it shows a frozen tensor."""

    def of(self, memory: WeightBuffer) -> torch.Tensor:
        return memory.parts[self.part].view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    def behind(self, copy: torch.Tensor, view: torch.Tensor) -> "_Source | None":
        """What a view of a contiguous copy of this shows of the memory; None if the view joins dimensions."""
        strides = dict(zip(copy.stride(), self.stride, strict=True))
        stride = [strides.get(own, 0) for own in view.stride()]
        if any(size > 1 and own not in strides for size, own in zip(view.shape, view.stride(), strict=True)):
            return None
        offset, left = self.offset, int(view.storage_offset())
        for own, theirs in zip(copy.stride(), self.stride, strict=True):
            index, left = divmod(left, own)
            offset += index * theirs
        return _Source(self.part, self.dtype, offset, tuple(view.shape), tuple(stride), self.frozen)


class CopyRecorder(TorchDispatchMode):
    """Records every copy out of weight memory while it is active."""

    def __init__(self, memory: WeightBuffer, record: VersionRecord) -> None:
        """The tensors to be copied are views of `memory`, which holds `record`."""
        super().__init__()
        tensors = [memory.tensor(spec) for spec in record.manifest if spec.frozen]
        self._frozen = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self._parts = {_address(part): index for index, part in enumerate(memory.parts)}
        # By their addresses, which stay theirs while they are kept: transposed copies, as vLLM makes for gpt-oss.
        self._copied: dict[int, tuple[torch.Tensor, _Source]] = {}
        self.copies: list[tuple[torch.Tensor, _Source]] = []
        self.complete = True
        """Whether the copies are all that was read: a cast or a sum of published tensors cannot be repeated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and (source := self._source(args[1])) is not None:
            self.copies.append((args[0], source))
        elif func is torch.ops.aten.clone.default and result.is_contiguous() and (source := self._source(args[0])):
            self._copied[_address(result)] = result, source
        elif any(map(self._in_memory, tree_leaves((args, kwargs)))) and not all(
            map(self._in_memory, tree_leaves(result))
        ):
            self.complete = False
        return result

    def _source(self, tensor: torch.Tensor) -> _Source | None:
        """Where a tensor's values lie in the memory, if it is a view of it or of a copy."""
        address = _address(tensor)
        if address in self._copied:
            copy, source = self._copied[address]
            return source.behind(copy, tensor)
        if (part := self._parts.get(address)) is None:
            return None
        frozen = any(begin <= tensor.data_ptr() < end for begin, end in self._frozen)
        return _Source(part, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), frozen)

    def _in_memory(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (_address(value) in self._parts or _address(value) in self._copied)


class CopyPlan:
    """Loads versions that have the same layout as a recorded one."""

    def __init__(self, model: nn.Module, record: VersionRecord, recorder: CopyRecorder) -> None:
        """`recorder` was active while the model's `load_weights` loaded `record`."""
        self._modules = tuple(model.modules())
        self._layout = record.manifest.layout
        self._addresses = _addresses(self._modules)
        self._on_gpu = on_gpu(destination for destination, _ in recorder.copies)
        on_cpu = all(destination.is_cpu for destination, _ in recorder.copies)
        self._usable = recorder.complete and (self._on_gpu or on_cpu)
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
        plain |= {_address(cast(torch.Tensor, layer.kv_b_proj.weight)) for layer in absorbing(model)}
        self._packs: list[tuple[nn.Module, torch.Tensor | _Source, bool]] = []  # the last says whether it is frozen
        for layer in layers:
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            copies = into[_address(weight)]
            whole = _as_one(weight, copies)
            self._packs.append((layer, whole or weight, {source.frozen for _, source in copies} == {True}))
            if whole is not None and _address(weight) not in plain:
                del into[_address(weight)]
                # Only the packed copy is read from now on. A layer that reads the plain one all the same computes NaN,
                # and not with weights of an earlier version.
                weight.data.fill_(torch.nan)
        self._copies = [pair for pairs in into.values() for pair in pairs]
        self._in_place = packed_in_place(model)
        # For each memory, the operations that load it, in stages that run one after the other. They are kept, because
        # hundreds of views take long to make, and they are gone with the memory.
        self._stages: WeakKeyDictionary[WeightBuffer, dict[bool, list[Sequence[Operation]]]] = WeakKeyDictionary()

    def fits(self, record: VersionRecord) -> bool:
        """Whether the plan can load this version into the model as it is now."""
        return self._usable and record.manifest.layout == self._layout and _addresses(self._modules) == self._addresses

    def load(self, memory: WeightBuffer, workers: Workers, *, frozen: bool) -> None:
        """Brings what lies in `memory` into the model, with frozen tensors or without."""
        frozen = frozen or bool(self._in_place)  # what was changed in place has to be copied again
        stages = self._stages.setdefault(memory, {})
        if frozen not in stages:
            pairs = [(destination, s.of(memory)) for destination, s in self._copies if frozen or not s.frozen]
            copies = [partial(copy, pairs)] if self._on_gpu else workers.copies(pairs)
            packs = [(layer, s) for layer, s, is_frozen in self._packs if frozen or not is_frozen]
            published = [(layer, s.of(memory)) for layer, s in packs if isinstance(s, _Source)]
            loaded = [(layer, s) for layer, s in packs if isinstance(s, torch.Tensor)]
            # Copies come after packing, because they are short and keep all threads busy until the end.
            first = [*_packing(published, pack_again), *copies]
            stages[frozen] = [first, _packing(loaded, pack_again), self._in_place]
        for operations in stages[frozen]:
            workers.run(operations)


def pack_weights(model: nn.Module, workers: Workers) -> None:
    """Packs the loaded weights again, which the next forward pass computes with. Does nothing on a GPU."""
    workers.run(_packing([(layer, cast(torch.Tensor, layer.weight)) for layer in packed_layers(model)], pack))
    workers.run(packed_in_place(model))


def _packing(layers: Sequence[tuple[nn.Module, torch.Tensor]], how: Callable[..., None]) -> list[Operation]:
    """The operations that pack these layers, the longest first."""
    return [partial(how, *packed) for packed in sorted(layers, key=lambda packed: packed[1].nbytes, reverse=True)]


def _as_one(weight: torch.Tensor, copies: Sequence[tuple[torch.Tensor, _Source]]) -> _Source | None:
    """The piece of memory that equals a weight, if the copies into the weight come from one contiguous piece."""
    if not copies or not weight.is_contiguous():
        return None
    ordered = sorted(copies, key=lambda pair: pair[0].storage_offset())
    part, first = ordered[0][1].part, ordered[0][1].offset
    end = 0
    for destination, source in ordered:
        rows = torch.empty(source.shape, device="meta").stride()
        if (
            destination.storage_offset() - weight.storage_offset() != end
            or source.offset - first != end
            or (source.part, source.dtype) != (part, weight.dtype)
            or not destination.is_contiguous()
            or source.stride != rows
        ):
            return None
        end += destination.numel()
    return _Source(part, weight.dtype, first, tuple(weight.shape), weight.stride()) if end == weight.numel() else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(modules: Iterable[nn.Module]) -> list[int]:
    """Addresses of the modules' parameters. Ten times as fast as `model.parameters()`, which walks names as well."""
    return [p.data_ptr() for module in modules for p in vars(module)["_parameters"].values() if p is not None]
