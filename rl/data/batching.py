"""Splits a batch over data-parallel ranks and into micro-batches, and puts the results back in order.

Also checks a batch before it is sent, and merges metrics of its parts. Pure functions of NumPy arrays.
"""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl.checks import MAX_FLOAT32, MIN_FLOAT32
from rl.data.packing import ModelFlops, PrefixGroup, group_by_prefix
from rl.sampling import KeptSets, routes_fault
from rl.types import Datum

_DTYPES = {"target_tokens": np.int64, "reported_mask": np.bool_}
_LOGPROBS = ("logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")
_MOST_ROUNDING = 0.01  # how far above 0 a log-prob computed in bfloat16 may be
_KINDS: Mapping[str, Any] = {
    "loss_inputs": Mapping,
    "temperature": numbers.Real,
    "kept": KeptSets | None,
    "routes": np.ndarray | None,
    "images": tuple,
}  # of the fields of a datum that do not depend on the model
Result = TypeVar("Result")
Microbatches = Sequence[tuple[int, ...]]
"""Of one rank, as units of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Assigns every datum of a batch to a rank and a micro-batch."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """For each rank, for each micro-batch, the indices of its datums. Every rank has the same number of micro-batches,
    because computing one is a collective operation; a rank with less work ends with empty ones."""

    def split(self, batch: Sequence[Datum]) -> list[list[list[Datum]]]:
        """The datums of each micro-batch of each rank."""
        return [[[batch[i] for i in microbatch] for microbatch in rank] for rank in self.microbatches]

    def restore(self, results: Sequence[Sequence[Result]]) -> tuple[Result, ...]:
        """Puts results into the order of the batch. Each rank's results are in the order of its micro-batches."""
        by_index: dict[int, Result] = {}
        for rank, rank_results in zip(self.microbatches, results, strict=True):
            indices = [i for microbatch in rank for i in microbatch]
            by_index.update(zip(indices, rank_results, strict=True))
        return tuple(by_index[i] for i in range(len(by_index)))


def plan_batch(
    batch: Sequence[Datum],
    *,
    num_ranks: int,
    max_tokens_per_microbatch: int,
    share_prefixes: bool,
    flops: ModelFlops | None = None,
) -> BatchPlan:
    """Splits a batch over ranks, and each rank's local batch into micro-batches, both balanced.

    One rank's micro-batches are balanced by tokens. Several ranks wait for each other at every micro-batch. With
    `flops`, theirs are balanced by tokens or by the operations that it counts, whichever has them wait less.

    With `share_prefixes`, datums with a shared prefix stay together, and what they share is counted once, as on a
    packed row. A micro-batch has at most `max_tokens_per_microbatch` tokens, unless it is a single datum that has more,
    alone or with its copies.
    """
    lengths = [len(datum.tokens) for datum in batch]
    groups = group_by_prefix(batch, share_prefixes=share_prefixes)
    tokens_per_rank = -(-sum(group.num_tokens(lengths) for group in groups) // num_ranks)
    # A unit is a group, or a part of a large one, and goes to one micro-batch as a whole.
    units = [part for group in groups for part in _cut(group, lengths, max_tokens_per_microbatch, tokens_per_rank)]
    sizes = [unit.num_tokens(lengths) for unit in units]
    packed = _pack_ranks(sizes, sizes, num_ranks, max_tokens_per_microbatch)
    if num_ranks > 1 and flops is not None and flops.per_token:
        scored = [int(datum.counted.sum()) for datum in batch]
        loads = [
            flops.training_of(size, sum(scored[i] for i in unit.members), unit.num_pairs(lengths))
            for size, unit in zip(sizes, units, strict=True)
        ]
        plans = packed, _pack_ranks(loads, sizes, num_ranks, max_tokens_per_microbatch)
        packed = _least_waiting(plans, loads)
    most = max(len(rank) for rank in packed)
    return BatchPlan(
        microbatches=tuple(
            (*(tuple(i for u in bin_ for i in units[u].members) for bin_ in rank), *[()] * (most - len(rank)))
            for rank in packed
        )
    )


def _cut(group: PrefixGroup, lengths: Sequence[int], budget: int, tokens_per_rank: int) -> list[PrefixGroup]:
    """Cuts a group into parts of similar size with at most `budget` tokens each, where that is possible.

    Every part repeats the prefix. The suffixes of a part have at most `tokens_per_rank` tokens, so that one large group
    does not unbalance the ranks.
    """
    prefix = min(group.shared[1:], default=0)
    num_tokens = group.num_tokens(lengths) - prefix
    room = min(budget - prefix, tokens_per_rank)
    num_parts = -(-num_tokens // max(1, room))
    target = -(-num_tokens // max(1, num_parts))
    parts: list[PrefixGroup] = []
    begin, size = 0, lengths[group.members[0]] - prefix
    for k in range(1, len(group.members)):
        length = lengths[group.members[k]]
        added = length - group.shared[k]
        if added and (size + added > room or size >= target):
            parts.append(group.part(begin, k))
            begin, size = k, length - prefix
        else:
            size += added
    return [*parts, group.part(begin, len(group.members))]


def _balance(loads: Sequence[float], indices: Sequence[int], num_bins: int) -> list[tuple[int, ...]]:
    """Largest first, each into the emptiest bin. The fullest bin is at most 4/3 of the optimum (Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = np.zeros(num_bins)
    for i in sorted(indices, key=lambda i: (-loads[i], i)):
        emptiest = int(sums.argmin())
        bins[emptiest].append(i)
        sums[emptiest] += loads[i]
    return [tuple(reversed(members)) for members in bins]


def _pack_ranks(loads: Sequence[float], sizes: Sequence[int], num_ranks: int, budget: int) -> Sequence[Microbatches]:
    """Every rank's micro-batches: as many for each, but for a rank with fewer units than that."""
    shards = _balance(loads, range(len(sizes)), num_ranks)
    num_bins, packed = 0, list[Microbatches]()
    while num_bins < max(map(len, packed), default=1):
        num_bins = max(map(len, packed), default=1)
        packed = [_pack(loads, sizes, shard, budget, num_bins) for shard in shards]
    return packed


def _least_waiting(plans: Iterable[Sequence[Microbatches]], loads: Sequence[float]) -> Sequence[Microbatches]:
    """The plan whose ranks wait least for each other, each rank's largest micro-batches first.

    Ranks compute their first micro-batches together, then their second ones: each takes as long as the largest of them.
    """

    def load(members: Sequence[int]) -> float:
        return sum(loads[i] for i in members)

    in_order = [[sorted(rank, key=load, reverse=True) for rank in plan] for plan in plans]
    return min(in_order, key=lambda ranks: sum(max(map(load, step)) for step in zip_longest(*ranks, fillvalue=())))


def _pack(loads: Sequence[float], sizes: Sequence[int], shard: Sequence[int], budget: int, least: int) -> Microbatches:
    """Packs one rank's local batch into balanced micro-batches: as few as possible within the budget, or `least`."""
    num_bins = max(least, -(-sum(sizes[i] for i in shard) // budget))
    while True:  # balanced bins may exceed the budget even if their average does not; then one more is tried
        for by in (loads, sizes):
            bins = [members for members in _balance(by, shard, num_bins) if members]
            if all(len(members) == 1 or sum(sizes[i] for i in members) <= budget for members in bins):
                return bins
        num_bins += 1


def checked_data(batch: Iterable[Datum]) -> tuple[Datum, ...]:
    """The data of a batch. Raises ValueError, naming what is there instead, unless it is one Datum or several."""
    if isinstance(batch, Datum) or not isinstance(batch, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"batch is a {type(batch).__name__}; it must be a sequence of Datums")
    data = tuple(batch)
    for i, datum in enumerate(data):
        if not isinstance(datum, Datum):  # pyright: ignore[reportUnnecessaryIsInstance] - unchecked callers
            raise ValueError(f"batch[{i}] is a {type(datum).__name__}; it must be a Datum")
        for name, kind in _KINDS.items():
            if not isinstance(value := getattr(datum, name), kind):
                raise ValueError(f"batch[{i}].{name} is {value!r:.200}; see rl.types.Datum for what it must be")
    if not data:
        raise ValueError("batch is empty; it must hold at least one Datum")
    return data


def validate_batch(
    batch: Sequence[Datum],
    *,
    required_inputs: Sequence[str] = (),
    vocab_size: int,
    max_seq_len: int,
    experts: tuple[int, int, int] | None = None,
    reads_images: bool = False,
) -> None:
    """Raises ValueError, naming the datum and the field, if no trainer could compute the batch.

    `required_inputs` names the loss inputs that the loss needs besides `target_tokens`. `experts` is as in
    `rl.sampling.routes_fault`; None refuses routes.
    """
    for i, datum in enumerate(checked_data(batch)):
        _check_array(f"batch[{i}].tokens", datum.tokens, np.int64)
        if not 1 <= len(datum.tokens) <= max_seq_len:
            raise ValueError(
                f"batch[{i}].tokens has length {len(datum.tokens)}; the model takes between 1 and {max_seq_len} tokens"
            )
        _check_token_ids(f"batch[{i}].tokens", datum.tokens, vocab_size)
        if datum.images and not reads_images:
            raise ValueError(f"batch[{i}].images holds {len(datum.images)}; the model, or its engine, takes text only")
        _check_places(f"batch[{i}].images", datum)
        for name in ("target_tokens", *required_inputs):
            if name not in datum.loss_inputs:
                raise ValueError(f"batch[{i}].loss_inputs lacks {name!r}; it has {sorted(datum.loss_inputs)}")
        if datum.loss_inputs.keys() != (names := batch[0].loss_inputs.keys()):
            raise ValueError(
                f"batch[{i}].loss_inputs has {sorted(datum.loss_inputs)}; batch[0].loss_inputs has {sorted(names)}, "
                "and all datums of a batch must have the same"
            )
        for name, array in datum.loss_inputs.items():
            field = f"batch[{i}].loss_inputs[{name!r}]"
            _check_array(field, array, _DTYPES.get(name))
            if len(array) != len(datum.tokens):
                raise ValueError(f"{field} has length {len(array)}; batch[{i}].tokens has length {len(datum.tokens)}")
            if name in _LOGPROBS and len(above := np.flatnonzero(array > _MOST_ROUNDING)):
                raise ValueError(f"{field}[{above[0]}] is {array[above[0]]}; a log-prob is at most 0")
        _check_token_ids(f"batch[{i}].loss_inputs['target_tokens']", datum.loss_inputs["target_tokens"], vocab_size)
        if not MIN_FLOAT32 <= datum.temperature <= MAX_FLOAT32:
            raise ValueError(f"batch[{i}].temperature is {datum.temperature}; it must be finite and above 0")
        if datum.kept is not None and (fault := datum.kept.fault(datum.loss_inputs["target_tokens"], vocab_size)):
            raise ValueError(f"batch[{i}].kept {fault}")
        _check_routes(f"batch[{i}]", datum, batch[0], experts)


def _check_routes(name: str, datum: Datum, first: Datum, experts: tuple[int, int, int] | None) -> None:
    if (datum.routes is None) != (first.routes is None):
        raise ValueError(f"{name} and batch[0] differ in having routes; all datums of a batch must have them, or none")
    if datum.routes is None:
        return
    if experts is None:
        raise ValueError(f"{name}.routes is given, and the layers of this trainer's model have no experts to choose")
    if fault := routes_fault(datum.routes, len(datum.tokens), experts):
        raise ValueError(f"{name}.routes {fault}")


def _check_array(field: str, array: np.ndarray, dtype: type[np.generic] | None) -> None:
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray) or array.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance] - unchecked callers
        shape = getattr(array, "shape", None)
        raise ValueError(
            f"{field} is a {type(array).__name__} of shape {shape}; a NumPy array of one dimension is expected"
        )
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"{field} has dtype {array.dtype}; {np.dtype(dtype)} is expected")
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:  # torch has no float of 128 bits
        raise ValueError(f"{field} has dtype {array.dtype}; numbers of at most 64 bits are expected")
    if len(outside := np.flatnonzero(~(np.abs(array) <= np.float64(MAX_FLOAT32)))):
        raise ValueError(f"{field}[{outside[0]}] is {array[outside[0]]}; every value must be finite, in float32")


def _check_places(field: str, datum: Datum) -> None:
    end = 0
    for number, image in enumerate(datum.images):
        if not end <= image.start <= len(datum.tokens) - image.num_tokens or image.num_tokens < 1:
            raise ValueError(
                f"{field}[{number}] takes {image.num_tokens} tokens from {image.start} on; images must follow each "
                f"other within the datum's {len(datum.tokens)} tokens"
            )
        if not image.inputs:
            raise ValueError(f"{field}[{number}].inputs is empty; `Renderer.read_again` reads recorded images again")
        end = image.start + image.num_tokens


def _check_token_ids(field: str, array: NDArray[np.int64], vocab_size: int) -> None:
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"{field}[{first}] is {array[first]}; token ids are between 0 and {vocab_size - 1}")


def plain_datum(datum: Datum) -> Datum:
    """The datum without types of the user's, which one rank might not know while the others compute."""
    arrays = (datum.tokens, *datum.loss_inputs.values())
    if type(datum) is Datum and type(datum.loss_inputs) is dict and all(type(each) is np.ndarray for each in arrays):
        return datum
    inputs = {str(name): np.asarray(array) for name, array in datum.loss_inputs.items()}
    return replace(
        Datum(tokens=np.asarray(datum.tokens), loss_inputs=inputs),
        temperature=float(datum.temperature),
        kept=datum.kept,
        routes=datum.routes,
        images=datum.images,
    )


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merges metrics of a batch's parts: `_max` and `_min` names by maximum and minimum, all others by sum."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith("_max"):
                merged[name] = max(merged[name], value)
            elif name.endswith("_min"):
                merged[name] = min(merged[name], value)
            else:
                merged[name] += value
    return merged
