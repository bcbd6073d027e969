"""The pushing side of weight synchronisation: every trainer rank casts its own shards into the published version.

No rank gathers anything: a shard goes to its rows of a buffer that all ranks map (one host), or to TorchStore as it is
(any hosts). What a buffer is and why a reader never sees two versions at once is in `rl/weights/buffer.py`.
"""

import asyncio
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate

from rl.types import WeightTransport
from rl.weights.buffer import WeightBuffer
from rl.weights.checksums import add_up, element_sum
from rl.weights.copy_threads import Workers
from rl.weights.host import host_identity
from rl.weights.manifest import (
    INDEX_KEY,
    LIVING_VERSIONS,
    Manifest,
    VersionRecord,
    WeightsError,
    build_manifest,
    manifest_checksum,
)
from rl.weights.registry import Store

T = TypeVar("T")

_MAX_PUTS_IN_FLIGHT = 8


class WeightPublisher:
    """Publishes a model's parameters, version after version. One per trainer rank, made alike on all of them."""

    def __init__(
        self,
        dtype: torch.dtype,
        transport: WeightTransport = "auto",
        *,
        store: Store | None = None,
        reader_timeout_s: float = 60.0,
        full_checksums: bool = False,
    ) -> None:
        """`dtype` is the generator's. `store` defaults to this process's TorchStore client.

        With `auto`, TorchStore carries the weights if shared memory does not suffice, which a warning says; with
        `shared_memory` the first push raises then. A push waits at most `reader_timeout_s` for generators that still
        read the version two pushes back. `full_checksums` makes every pull check every byte of what it reads in shared
        memory, and every push compute as much; what TorchStore carries is always checked in full. Raises ValueError
        for a transport that does not exist.
        """
        if transport not in get_args(WeightTransport):
            accepted = ", ".join(get_args(WeightTransport))
            raise ValueError(f"weight transport is {transport!r}; it must be one of {accepted}")
        self._dtype = dtype
        self._choice: WeightTransport = transport
        self._store = store
        self._reader_timeout_s = reader_timeout_s
        self._full_checksums = full_checksums
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._manifest: Manifest = ()
        self._layout = b""
        self._shapes: dict[str, tuple[int, ...]] = {}  # of this rank's tensors, whole
        self._writers: dict[str, int] = {}  # tensors that are not sharded: which rank writes them
        self._regions: dict[str, tuple[Any, tuple[slice, ...] | None]] = {}  # of sharded ones: placements, what is ours
        self._buffers: list[WeightBuffer] = []
        self._introduced: set[tuple[int, int, int] | None] = set()
        self._workers: Workers | None = None
        self._push_index = -1
        # Rank 0's: what the index in the store says, and the last push_index with its checksums.
        self._records: tuple[VersionRecord, ...] = ()
        self._last: tuple[VersionRecord, tuple[int, ...]] | None = None

    async def publish(self, version: int, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> VersionRecord | None:
        """Publishes `named_parameters` (Hugging Face names, possibly DTensors) as `version`.

        A collective: every rank calls it, with its own parameters. When it returns on every rank the version can be
        pulled, and the one published before still can. Returns its record on rank 0, which spares who pulls it the
        look into the store. Tied parameters are passed once. Warns (Python's `warnings`, so in this process's log) if
        no parameter changed although the version did.

        Raises `WeightsError` when memory is short, a reader never lets go or TorchStore fails; nothing is published
        then.
        """
        tensors = [(name, tensor.detach()) for name, tensor in named_parameters]
        if not self._manifest:
            await asyncio.to_thread(self._prepare, tensors)
        self._push_index += 1
        buffer = self._buffers[self._push_index % LIVING_VERSIONS] if self._buffers else None
        record = VersionRecord(
            version=version,
            push_index=self._push_index,
            manifest=self._manifest,
            dtype=self._dtype,
            transport="shared_memory" if buffer else "torchstore",
            host=host_identity(),
            buffer=buffer.location if buffer else None,
            layout=self._layout,
            full_checksums=self._full_checksums or buffer is None,
        )
        if buffer is not None:
            await self._introduce(record)
            await asyncio.to_thread(self._write_buffer, buffer, record, tensors)
        else:
            record = await self._put_tensors(record, tensors)
            if self._rank == 0:
                await self._announce(record)
        return record if self._rank == 0 else None

    def _prepare(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Agrees with the other ranks on the manifest and, on one host, on the buffers."""
        local = [(name, tuple(t.shape), self._cast_dtype(t), isinstance(t, DTensor)) for name, t in tensors]
        union: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        if len(self._shapes) < len(tensors):
            raise ValueError(f"weights name {len(tensors)} tensors but only {len(self._shapes)} different ones")
        for rank, entries in enumerate(_all_gather(local)):
            for name, shape, dtype, sharded in entries:
                if union.setdefault(name, (shape, dtype)) != (shape, dtype):
                    raise ValueError(f"trainer ranks disagree on {name!r}: {union[name]} and {(shape, dtype)}")
                if not sharded:
                    self._writers.setdefault(name, rank)
        # In the model's order, in which the tensors that a generator fuses are neighbours.
        manifest = build_manifest((name, *spec) for name, spec in union.items())
        if self._choice != "torchstore":
            self._buffers = self._map_buffers(manifest)
            self._workers = Workers()
        self._manifest, self._layout = manifest, manifest_checksum(manifest)

    def _map_buffers(self, manifest: Manifest) -> list[WeightBuffer]:
        """Rank 0 allocates, the others map. None with `auto` where that is impossible, else every rank raises."""
        outcome: list[Any] = [None]
        buffers: list[WeightBuffer] = []
        several_hosts = len(set(_all_gather(host_identity()))) > 1
        if self._rank == 0:
            try:
                if several_hosts:
                    raise WeightsError(
                        "the trainer's ranks are on several hosts; weights need weight_transport='torchstore'"
                    )
                buffers = WeightBuffer.create_for(manifest)
                outcome = [[buffer.location for buffer in buffers]]
            except WeightsError as error:
                outcome = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, src=0)
        problem = outcome[0]
        if not isinstance(problem, WeightsError):
            return buffers or [WeightBuffer.open(location, writable=True) for location in problem]
        if self._choice == "shared_memory":
            raise problem
        if self._rank == 0:
            warnings.warn(f"TorchStore carries the weights, which takes tens of times longer: {problem}", stacklevel=2)
        return []

    @torch.no_grad()
    def _write_buffer(
        self, buffer: WeightBuffer, record: VersionRecord, tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        """Casts this rank's shards into their places. Rank 0 holds the lock, and seals the header when all have."""
        specs = {spec.name: spec for spec in record.manifest}
        problem: Exception | None = None
        try:
            if self._rank == 0:
                buffer.begin_write(self._reader_timeout_s)
        except WeightsError as error:
            problem = error
        _raise_on_every_rank(problem)
        try:
            self._check_same(tensors)
            assert self._workers is not None
            self._workers.copy(
                (buffer.tensor(specs[name])[region], local)
                for name, tensor in tensors
                for local, region in [self._shard(name, tensor)]
                if local is not None
            )
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            problem = error
        try:
            _raise_on_every_rank(problem)
        except BaseException:
            buffer.abandon_write()
            raise
        if self._rank == 0:
            checksums = buffer.checksums(record)
            self._warn_if_unchanged(record, checksums)
            buffer.seal(record, checksums)

    def _warn_if_unchanged(self, record: VersionRecord, checksums: tuple[int, ...]) -> None:
        """Warns of a new version that holds what the one before held."""
        before, checksums_before = self._last or (record, checksums)
        self._last = (record, checksums)
        if before.version == record.version or checksums_before != checksums:
            return
        if record.buffer is not None and not record.full_checksums:
            if before.buffer == record.buffer:  # a push in between failed: what to compare with is gone
                return
            buffers = [self._buffers[r.push_index % LIVING_VERSIONS] for r in (before, record)]
            if not buffers[0].holds_same_as(buffers[1], record.manifest):
                return
        warnings.warn(
            f"version {record.version} is published with exactly the weights of version {before.version}: no"
            f" parameter changed in {self._dtype}",
            stacklevel=2,
        )

    def _check_same(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The layout was agreed at the first push; what does not keep to it would silently leave old bytes."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        if shapes != self._shapes:
            differing = sorted(n for n in shapes.keys() | self._shapes.keys() if shapes.get(n) != self._shapes.get(n))
            changes = ", ".join(f"{n!r} was {self._shapes.get(n)} and is {shapes.get(n)}" for n in differing)
            raise ValueError(f"weights have other names or shapes than at the first push: {changes}")

    def _shard(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, tuple[slice, ...]]:
        """What this rank writes of a tensor, if anything, and where it belongs in the full one."""
        if not isinstance(tensor, DTensor):
            return (tensor if self._writers[name] == self._rank else None), ()
        placements, region = self._regions.get(name, (None, None))
        if placements != tensor.placements:
            region = _region(name, tensor)
            self._regions[name] = (tensor.placements, region)
        return (tensor.to_local(), region) if region is not None else (None, ())

    async def _put_tensors(self, record: VersionRecord, tensors: Sequence[tuple[str, torch.Tensor]]) -> VersionRecord:
        """Hands this rank's shards to TorchStore, a few at a time, and waits for those of the other ranks.

        Returns the record with the checksums.
        """
        limit = asyncio.Semaphore(_MAX_PUTS_IN_FLIGHT)
        sums: dict[str, int] = {}

        async def put(store: Store, name: str, tensor: torch.Tensor) -> None:
            async with limit:
                # A clone, because pickling a view would ship all of the storage it looks at.
                value = tensor.to(self._cast_dtype(tensor), copy=True).contiguous()
                if self._shard(name, value)[0] is not None:
                    sums[name] = element_sum(value.to_local() if isinstance(value, DTensor) else value)
                await store.put(record.key(name), value)

        problem: Exception | None = None
        try:
            self._check_same(tensors)
            store = await self._get_store()
            mine = [(n, t) for n, t in tensors if isinstance(t, DTensor) or self._writers[n] == self._rank]
            await asyncio.gather(*(put(store, name, tensor) for name, tensor in mine))
        except ValueError as error:
            problem = error
        except Exception as error:  # a dead TorchStore raises what Monarch does
            problem = WeightsError(f"TorchStore did not take version {record.version}: {error}")
        await asyncio.to_thread(_raise_on_every_rank, problem)
        of_ranks = await asyncio.to_thread(_all_gather, sums)
        checksums = tuple(add_up(of_rank.get(spec.name, 0) for of_rank in of_ranks) for spec in record.manifest)
        record = replace(record, checksums=checksums)
        if self._rank == 0:
            self._warn_if_unchanged(record, checksums)
        return record

    async def _introduce(self, record: VersionRecord) -> None:
        """Makes a buffer known at the first push into it; its header says of every later one which version it holds."""
        if record.buffer in self._introduced:
            return
        problem: Exception | None = None
        try:
            if self._rank == 0:
                await self._announce(record)
        except WeightsError as error:
            problem = error
        await asyncio.to_thread(_raise_on_every_rank, problem)
        self._introduced.add(record.buffer)

    async def _announce(self, record: VersionRecord) -> None:
        """Tells TorchStore, and has it forget the version that lives no longer."""
        store = await self._get_store()
        kept = (*self._records, record)[-LIVING_VERSIONS:]
        try:
            await store.put(INDEX_KEY, kept)
        except Exception as error:  # a dead TorchStore raises what Monarch does
            raise WeightsError(f"version {record.version} was not published: TorchStore failed: {error}") from error
        dropped = [old for old in self._records if old not in kept and old.buffer is None]
        self._records = kept
        await asyncio.gather(*(store.delete(old.key(spec.name)) for old in dropped for spec in old.manifest))

    async def _get_store(self) -> Store:
        if self._store is None:
            import torchstore  # starts Monarch, which a publisher with a store of its own does not need

            self._store = await torchstore.client()
        return self._store

    def _cast_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def _region(name: str, tensor: DTensor) -> tuple[slice, ...] | None:
    """Where this rank's shard belongs in the full tensor; None if it is empty or another rank writes the same."""
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


def _all_gather(value: T) -> list[T]:
    """Every rank's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_on_every_rank(problem: Exception | None) -> None:
    """A barrier that raises everywhere if one rank has a problem, so that no rank waits for one that gave up."""
    problems = _all_gather(str(problem) if problem else None)
    if problem:
        raise problem
    for rank, text in enumerate(problems):
        if text:
            raise WeightsError(f"trainer rank {rank} could not publish its weights: {text}")
