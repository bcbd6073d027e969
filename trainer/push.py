"""The pushing side of weight synchronisation: every trainer rank publishes its own shards in the generator's dtype.

No rank gathers a model. The ranks agree once on the names and shapes of all tensors and on who sends what; how the
bytes travel is the business of `rl/weights/version.py`.
"""

import asyncio
import uuid
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate

from rl.lora import LoRAConfig
from rl.system.hardware import host_identity
from rl.system.ranks import all_gather, own_rank
from rl.types import WeightTransport
from rl.weights.store import Store, VersionIndex, receivers_on_hosts
from rl.weights.version import (
    Manifest,
    Sender,
    Shard,
    VersionRecord,
    WeightsError,
    build_manifest,
    load_transport,
    on_rank_0,
    raise_on_every_rank,
    transports,
    weight_dtype,
)

NamedTensors = Sequence[tuple[str, torch.Tensor]]
# Projections that vLLM fuses into one, in its order.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class WeightPublisher:
    """Publishes one policy's parameters, version after version. Every trainer rank has one, made with equal arguments.

    A policy is the model itself or an adapter. Each has its own buffers, and its own index in TorchStore.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        transport: WeightTransport = "auto",
        *,
        policy: str | None = None,
        lora: LoRAConfig | None = None,
        store: Store | None = None,
        store_name: str | None = None,
        reader_timeout_s: float = 60.0,
    ) -> None:
        """`dtype` is the generator's. `store` defaults to a client of the TorchStore that is named `store_name`.

        `policy` and `lora` are the name and the configuration of an adapter, whose tensors go by PEFT's names.

        An adapter, which is small, does not go by GPUs where a transport by GPUs was asked for.

        With `auto`, a transport that cannot carry the weights gives way to the next, with a warning; a transport that
        was asked for by name fails the first push instead. A push waits at most `reader_timeout_s` for generators that
        still read the version from two pushes ago.
        """
        self._dtype = dtype
        self._choice = transport
        self._policy = policy
        self._lora = lora
        self._store = store
        self._store_name = store_name
        self._reader_timeout_s = reader_timeout_s
        self._rank = own_rank()
        self._index = VersionIndex(self._get_store)
        self._shards = _Shards(self._rank)
        self._sender: Sender | None = None
        self._push: VersionRecord | None = None  # the last one, which the next one's record is made of
        self._last_version: int | None = None
        self.forget_frozen()

    def forget_frozen(self) -> None:
        """Has the next pushes send frozen tensors again, because they may have changed."""
        self._frozen_id = uuid.uuid4().bytes

    async def publish(
        self, version: int, named_parameters: Iterable[tuple[str, torch.Tensor]], frozen: Collection[str] = ()
    ) -> VersionRecord | None:
        """Publishes `named_parameters` (Hugging Face names, possibly DTensors) as `version`.

        Tensors named in `frozen`, always the same names, are sent once, and again after `forget_frozen`.

        A collective: every rank calls it with its own parameters, tied parameters once. When it has returned on every
        rank, this version and the one published before can be pulled. Returns the version's record on rank 0, with
        which a generator need not ask TorchStore for it. Warns (Python's `warnings`, so in this process's log) if no
        parameter changed although the version did.

        Raises `WeightsError`, and publishes nothing, if memory is short, a reader never lets go or TorchStore fails.
        """
        tensors = list(named_parameters)
        if self._policy is not None:  # small, so gathering is cheap, and ranks need not agree on who holds which part
            tensors = [(name, t.full_tensor().detach() if isinstance(t, DTensor) else t) for name, t in tensors]
        if self._sender is None or self._push is None:
            self._sender, self._push = await self._prepare(tensors, frozen)
        self._push = replace(
            self._push, version=version, push_index=self._push.push_index + 1, frozen_id=self._frozen_id
        )
        record, unchanged = await self._sender.send(self._push, self._shards.of(tensors))
        before, self._last_version = self._last_version, version
        if self._rank > 0:
            return None
        if unchanged and version != before:
            warnings.warn(
                f"version {version} is published with exactly the weights of version {before}: no parameter changed in"
                f" {self._dtype}",
                stacklevel=2,
            )
        return record

    async def close(self) -> None:
        """Withdraws every version and frees its memory. A collective. A generator that is reading one may finish.

        Raises `WeightsError` if TorchStore fails. Nothing can be published afterwards.
        """
        if self._sender is None:
            return
        problem: WeightsError | None = None
        for free in (self._index.withdraw, partial(self._sender.close, self._index.records)):
            try:
                await free()
            except WeightsError as error:  # memory is freed although TorchStore is gone
                problem = problem or error
        await asyncio.to_thread(raise_on_every_rank, problem)

    async def _prepare(self, tensors: NamedTensors, frozen: Collection[str]) -> tuple[Sender, VersionRecord]:
        """Agrees with the other ranks on a manifest and on a transport that can carry it. The record is of no push."""
        manifest = await asyncio.to_thread(self._shards.agree, tensors, self._dtype, frozen)
        *preferred, last = await self._candidates()
        problem = ""
        for name in (*preferred, last):
            transport, asked = load_transport(name), self._choice != "auto"
            sender = transport.sender(self._index, reader_timeout_s=self._reader_timeout_s, asked=asked)
            try:
                await sender.prepare(manifest)
            except WeightsError as error:  # raised on every rank, so all try the same transport next
                if name == last:
                    raise
                problem = str(error)
                continue
            if problem and self._rank == 0:
                warnings.warn(f"{transport.fallback_notice}: {problem}", stacklevel=2)
            return sender, VersionRecord(
                version=-1,
                push_index=-1,
                manifest=manifest,
                dtype=self._dtype,
                transport=name,
                host=host_identity(),
                policy=self._policy,
                lora=self._lora,
            )
        raise AssertionError("there is always a last transport")

    async def _candidates(self) -> Sequence[str]:
        """The transports to try, on every rank the same."""
        without_gpus = self._policy is not None
        if self._choice != "auto":
            return [(load_transport(self._choice).without_gpus if without_gpus else "") or self._choice]
        several = await on_rank_0(self._has_other_hosts)
        known = {name: load_transport(name) for name in transports()}
        return [
            name
            for name, transport in known.items()
            if transport.between_hosts in (several, None)
            and not (transport.without_gpus and without_gpus)
            and transport.suits()
        ]

    async def _has_other_hosts(self) -> bool:
        return bool(await receivers_on_hosts(await self._get_store()))

    async def _get_store(self) -> Store:
        if self._store is None:
            if self._store_name is None:
                raise WeightsError("this trainer was started without a weight store to publish in")
            import torchstore  # starts Monarch, which a publisher with a store of its own does not need

            self._store = await torchstore.client(self._store_name)
        return self._store


class _Shards:
    """Which part of each tensor this rank sends."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shapes: dict[str, tuple[int, ...]] = {}  # the full shapes of this rank's tensors
        self._writers: dict[str, int] = {}  # the rank that sends each tensor that is not sharded
        # Placements and own region of each sharded tensor; kept, because computing a region takes long.
        self._regions: dict[str, tuple[tuple[Placement, ...], tuple[slice, ...] | None]] = {}

    def agree(self, tensors: NamedTensors, dtype: torch.dtype, frozen: Collection[str]) -> Manifest:
        """The manifest of all ranks' tensors, floating-point ones cast to `dtype`. A collective.

        Raises ValueError if ranks disagree on a tensor, or a name occurs twice.
        """
        local = {
            name: (tuple(t.shape), weight_dtype(name, dtype) if t.is_floating_point() else t.dtype)
            for name, t in tensors
        }
        if len(local) < len(tensors):
            raise ValueError(f"weights name {len(tensors)} tensors but only {len(local)} different ones")
        self._shapes = {name: shape for name, (shape, _) in local.items()}
        whole = [name for name, t in tensors if not isinstance(t, DTensor)]
        union: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        frozen_anywhere: set[str] = set()
        for rank, (entries, theirs, frozen_there) in enumerate(all_gather((local, whole, list(frozen)))):
            for name, entry in entries.items():
                if union.setdefault(name, entry) != entry:
                    raise ValueError(f"trainer ranks disagree on {name!r}: {union[name]} and {entry}")
            self._writers |= {name: rank for name in theirs if name not in self._writers}
            frozen_anywhere.update(frozen_there)
        return build_manifest(((name, *union[name]) for name in fused_parts_together(union)), frozen_anywhere)

    def of(self, tensors: NamedTensors) -> Iterator[Shard]:
        """This rank's shards. Iterating raises ValueError if names or shapes are not the agreed ones."""
        self._check_same(tensors)
        with torch.no_grad():  # where a DTensor tells its local part ten times as fast
            parts = [tensor.to_local() if isinstance(tensor, DTensor) else None for _, tensor in tensors]
        for (name, tensor), part in zip(tensors, parts, strict=True):
            if part is None:
                yield Shard(name, tensor, tensor if self._writers[name] == self._rank else None, ())
                continue
            assert isinstance(tensor, DTensor)
            placements, region = self._regions.get(name, (None, None))
            if placements != tensor.placements:
                region = _region(name, tensor)
                self._regions[name] = (tensor.placements, region)
            yield Shard(name, tensor, None if region is None else part, region or ())

    def _check_same(self, tensors: NamedTensors) -> None:
        # A tensor that is missing or smaller than agreed would silently leave old bytes in a buffer.
        shapes = {name: tensor.shape for name, tensor in tensors}
        if shapes != self._shapes:
            differing = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
            found = {name: tuple(shape) for name, shape in shapes.items()}
            changes = ", ".join(f"{n!r} was {self._shapes.get(n)} and is {found.get(n)}" for n in differing)
            raise ValueError(f"weights have other names or shapes than at the first push: {changes}")


def fused_parts_together(names: Iterable[str]) -> list[str]:
    """The names in their order, except that the parts of a fused weight follow the first of them.

    A generator on the CPU packs a fused weight from where it was published if its parts are neighbours there.
    """
    first: dict[tuple[str, int, str], int] = {}
    places: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(names):
        module, _, kind = name.rpartition(".")
        layer, _, projection = module.rpartition(".")
        places[name] = (index, 0)
        for group, parts in enumerate(_FUSED):
            if projection in parts:
                places[name] = (first.setdefault((layer, group, kind), index), parts.index(projection))
    return sorted(places, key=places.__getitem__)


def _region(name: str, tensor: DTensor) -> tuple[slice, ...] | None:
    """Where this rank's shard lies in the full tensor; None if it is empty or another rank sends the same."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name!r} holds partial sums on a mesh axis; only sharded and replicated weights exist")
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(
        isinstance(placement, Replicate) and position > 0
        for placement, position in zip(placements, coordinate, strict=True)
    ):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if 0 in shape:
        return None
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
