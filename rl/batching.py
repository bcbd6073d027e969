"""Cutting a batch into micro-batches of packed rows, sharing it out over data-parallel ranks, and putting results back.

Pure functions of NumPy arrays. Legend: T tokens of a datum, L tokens of a packed row, S scored positions of a row
(those of non-zero weight).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl.types import Datum

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Which rank computes which datum in which of its micro-batches."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """For each rank, for each micro-batch, the indices of its datums. Every rank has equally many micro-batches; those
    of a rank that has less to do are empty."""

    def split(self, batch: Sequence[Datum]) -> list[list[list[Datum]]]:
        """For each rank, for each micro-batch, its datums."""
        return [[[batch[i] for i in microbatch] for microbatch in rank] for rank in self.microbatches]

    def restore(self, results: Sequence[Sequence[Result]]) -> tuple[Result, ...]:
        """Takes each rank's results, one per datum in the order of its micro-batches, to the order of the batch."""
        placed: dict[int, Result] = {}
        for rank, of_rank in zip(self.microbatches, results, strict=True):
            indices = [i for microbatch in rank for i in microbatch]
            placed.update(zip(indices, of_rank, strict=True))
        return tuple(placed[i] for i in range(len(placed)))


def plan_batch(lengths: Sequence[int], *, num_ranks: int, max_tokens_per_microbatch: int) -> BatchPlan:
    """Shares datums out over ranks and packs each share into micro-batches, both balanced by tokens.

    `lengths` are the tokens of each datum. No micro-batch exceeds the budget, except one that holds a single datum
    longer than it. Within a micro-batch datums are in ascending order of length.
    """
    shares = _balance(lengths, range(len(lengths)), num_ranks)
    packed = [_pack(lengths, share, max_tokens_per_microbatch) for share in shares]
    most = max(len(rank) for rank in packed)
    return BatchPlan(microbatches=tuple((*rank, *[()] * (most - len(rank))) for rank in packed))


def _balance(lengths: Sequence[int], indices: Sequence[int], num_bins: int) -> list[tuple[int, ...]]:
    """Longest first, each into the emptiest bin: at most 4/3 of the best possible largest bin (Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = np.zeros(num_bins, dtype=np.int64)
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        emptiest = int(loads.argmin())
        bins[emptiest].append(i)
        loads[emptiest] += lengths[i]
    return [tuple(reversed(members)) for members in bins]


def _pack(lengths: Sequence[int], share: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Balanced micro-batches of one rank's share, as few as the budget allows a balanced split to have."""
    if not share:
        return []
    num_bins = max(1, -(-sum(lengths[i] for i in share) // budget))
    while True:
        bins = [members for members in _balance(lengths, share, num_bins) if members]
        if all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in bins):
            return bins
        num_bins += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The datums of one micro-batch, end to end without padding, with what the loss needs at scored positions."""

    tokens: NDArray[np.int64]
    """[L]"""
    positions: NDArray[np.int64]
    """[L] position within the datum; 0 starts the next datum."""
    lengths: tuple[int, ...]
    """Tokens of each datum."""
    scored: NDArray[np.int64]
    """[S] indices into the row."""
    datum_index: NDArray[np.int64]
    """[S] which datum of the row each scored position belongs to."""
    loss_inputs: Mapping[str, NDArray[Any]]
    """Each [S]; always holds `target_tokens` and `weights`."""

    def unpack(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """[S] values of the scored positions -> one [T] array per datum, 0 where nothing is scored."""
        row = np.zeros(len(self.tokens), dtype=np.float32)
        row[self.scored] = values
        return np.split(row, np.cumsum(self.lengths)[:-1])


def pack_row(datums: Sequence[Datum]) -> PackedRow:
    """Packs at least one datum; all name the same loss inputs."""
    lengths = tuple(len(datum.tokens) for datum in datums)
    weights = np.concatenate([datum.weights for datum in datums])
    scored = np.flatnonzero(weights)
    names = datums[0].loss_inputs.keys() - {"weights"}
    return PackedRow(
        tokens=np.concatenate([datum.tokens for datum in datums]),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=lengths,
        scored=scored,
        datum_index=np.repeat(np.arange(len(datums), dtype=np.int64), lengths)[scored],
        loss_inputs={
            "weights": weights[scored],
            **{name: np.concatenate([datum.loss_inputs[name] for datum in datums])[scored] for name in names},
        },
    )


def validate_batch(
    batch: Sequence[Datum], *, required_inputs: Sequence[str] = (), vocab_size: int, max_seq_len: int
) -> None:
    """Raises ValueError naming the datum and the field of the first thing that no trainer could compute with.

    `required_inputs` are names the loss needs beside `target_tokens`.
    """
    if len(batch) == 0:
        raise ValueError("batch is empty; it must hold at least one Datum")
    names = batch[0].loss_inputs.keys()
    for i, datum in enumerate(batch):
        _check_array(f"batch[{i}].tokens", datum.tokens, integer=True)
        if not 1 <= len(datum.tokens) <= max_seq_len:
            raise ValueError(
                f"batch[{i}].tokens has length {len(datum.tokens)}; the model takes between 1 and {max_seq_len} tokens"
            )
        _check_token_ids(f"batch[{i}].tokens", datum.tokens, vocab_size)
        for name in ("target_tokens", *required_inputs):
            if name not in datum.loss_inputs:
                raise ValueError(f"batch[{i}].loss_inputs lacks {name!r}; it has {sorted(datum.loss_inputs)}")
        if datum.loss_inputs.keys() != names:
            raise ValueError(
                f"batch[{i}].loss_inputs has {sorted(datum.loss_inputs)}; batch[0].loss_inputs has {sorted(names)}, "
                "and all datums of a batch must have the same"
            )
        for name, array in datum.loss_inputs.items():
            field = f"batch[{i}].loss_inputs[{name!r}]"
            _check_array(field, array, integer=name == "target_tokens")
            if len(array) != len(datum.tokens):
                raise ValueError(f"{field} has length {len(array)}; batch[{i}].tokens has length {len(datum.tokens)}")
        _check_token_ids(f"batch[{i}].loss_inputs['target_tokens']", datum.loss_inputs["target_tokens"], vocab_size)


def _check_array(field: str, array: NDArray[Any], *, integer: bool) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance] - unchecked callers
        shape = getattr(array, "shape", None)
        raise ValueError(
            f"{field} is a {type(array).__name__} of shape {shape}; a NumPy array of one dimension is expected"
        )
    if integer and array.dtype != np.int64:
        raise ValueError(f"{field} has dtype {array.dtype}; int64 is expected")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{field} has dtype {array.dtype}; numbers are expected")
    if not np.isfinite(array).all():
        first = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{field}[{first}] is {array[first]}; every value must be finite")


def _check_token_ids(field: str, array: NDArray[np.int64], vocab_size: int) -> None:
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"{field}[{first}] is {array[first]}; token ids are between 0 and {vocab_size - 1}")


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of parts of a batch -> of the whole: sums, except names that end in `_max` or `_min`."""
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
