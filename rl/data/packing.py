"""Packs the datums of one micro-batch into one row of tokens, without padding and with what they share only once.

All completions of a prompt begin with the same tokens. Under causal attention the hidden states of a prefix do not
depend on what follows, so the prefix is computed once and all its suffixes attend to it. The gradients of the suffixes
add up in the prefix. Completions that begin alike share these tokens in the same way, so that a prompt and its
completions are a tree. The results are the same, for a fraction of the tokens. Different prompts begin alike too, with
what the chat template puts before them; this opening of all datums can be computed once for the whole row.

Legend: T tokens of a datum, L tokens of the row, S scored positions (`Datum.scored`, counted per datum),
P different pairs of a token of the row and a target among them, scored under different distributions.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.images import PlacedImage
from rl.sampling import Ids, KeptSets, joined_routes, padded_routes
from rl.system.hf_config import num_experts, read_config
from rl.types import Datum, Head

Ints = NDArray[np.int64]
_PADDING_DOCUMENT = 128  # most tokens of a document of padding
_SHORTEST_OPENING = 8  # a shorter one is not worth the copies of its keys and values that every document needs
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_OTHER_ATTENTION = ("kv_lora_rank", "linear_num_key_heads", "hidden_size_per_layer_input", "enable_moe_block")
"""`ModelFlops` needs `_SIZES`, and does not count these layers: latent attention, gated delta rules, Gemma 4."""


@dataclass(frozen=True, slots=True)
class Document:
    """A part of a row whose tokens attend to nothing outside it but the opening: a prefix followed by its suffixes.

    A suffix attends to the prefix, to itself and to the suffixes that it branches off, but not to others.
    """

    prefix: int
    """Number of tokens of the prefix."""
    suffixes: tuple[int, ...] = ()
    """Number of tokens of each suffix."""
    opening: int = 0
    """Number of tokens at the start of the row that the document attends to as if it began with them."""
    depths: tuple[int, ...] = ()
    """Of each suffix: 1 if it branches off the prefix, d + 1 if it branches off the last suffix of depth d before it.
    Empty if all branch off the prefix."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole document, without the opening."""
        return self.prefix + sum(self.suffixes)

    def segments(self) -> list[tuple[int, int, int]]:
        """Of the prefix and every suffix: where it starts, where it stops, and up to where tokens attend to it."""
        bounds = np.cumsum((0, self.prefix, *self.suffixes)).tolist()
        depths = (0, *(self.depths or (1,) * len(self.suffixes)))
        until = [bounds[-1]] * len(depths)
        path: list[int] = []
        for i, depth in enumerate(depths):
            while path and depths[path[-1]] >= depth:
                until[path.pop()] = bounds[i]
            path.append(i)
        return list(zip(bounds, bounds[1:], until, strict=False))

    def seen_until(self) -> Ints:
        """[num_tokens] for each token, the first one after it that does not attend to it; else the document's end."""
        segments = self.segments()
        return np.repeat([until for *_, until in segments], [stop - start for start, stop, _ in segments])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The datums of one micro-batch as consecutive documents, with the loss inputs of the scored positions."""

    tokens: Ints
    """[L]"""
    positions: Ints
    """[L] position within the datum; a suffix continues the count of its prefix."""
    documents: tuple[Document, ...]
    """The documents in order; their numbers of tokens add up to L."""
    lengths: tuple[int, ...]
    """T of each datum, in the order of the micro-batch."""
    scored: Ints
    """[P] index into the row. A token that several suffixes follow occurs once for each of their first tokens."""
    targets: Ints
    """[P] the token that is scored after it."""
    temperatures: NDArray[np.float32]
    """[P] the temperature of the datum; the same pair of datums of different temperatures occurs once for each."""
    kept: KeptSets | None
    """P sets of tokens from which the targets were sampled, each another pair. None if no datum has any."""
    routes: Ids | None
    """[L, layers, k] the experts of each token. None if no datum has any."""
    pair_index: Ints
    """[S] index of the pair that has the score of the position."""
    datum_index: Ints
    """[S] index of the datum that the position belongs to."""
    datum_position: Ints
    """[S] position within that datum."""
    loss_inputs: Mapping[str, np.ndarray]
    """Name -> [S]; always holds `target_tokens` and `weights`."""
    images: tuple[PlacedImage, ...] = ()
    """At their places in the row. The tokens of an image belong to one document."""

    @property
    def num_loss_tokens(self) -> int:
        """The number of scored positions whose term counts."""
        return int(np.count_nonzero(self.loss_inputs["weights"]))

    def unpack(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """[S] values of the scored positions -> one [T] array per datum, 0 where nothing is scored."""
        starts = np.cumsum((0, *self.lengths))
        flat = np.zeros(starts[-1], dtype=np.float32)
        flat[starts[self.datum_index] + self.datum_position] = values
        return np.split(flat, starts[1:-1])


def pack_row(datums: Sequence[Datum], *, share_prefixes: bool, share_opening: bool = False) -> PackedRow:
    """Packs one micro-batch of at least one datum. All datums must have the same loss inputs.

    With `share_opening`, tokens that all datums begin with are a document of their own, at the start of the row.
    A rank is sent only the datums of its micro-batches, so they are grouped again, which finds the groups of the plan.
    """
    groups = group_by_prefix(datums, share_prefixes=share_prefixes)
    lengths = [len(datum.tokens) for datum in datums]
    opening = common_opening(datums, groups) if share_opening else 0
    pieces = [(0, slice(opening))]  # of datums, in the order of the row
    scored, datum_index, datum_position = list[Ints](), list[Ints](), list[Ints]()
    documents, images = [Document(opening)] if opening else list[Document](), list[PlacedImage]()
    places = np.arange(max(lengths))  # in the row, of the tokens of the datum in hand
    start = opening  # of what comes next in the row
    for group in groups:
        firsts = [max(shared, opening) for shared in group.shared]
        for i, first in zip(group.members, firsts, strict=True):
            datum, length = datums[i], lengths[i]
            pieces.append((i, slice(first, length)))
            images += [image.moved(start - first) for image in datum.images]
            places[first:length] = np.arange(start, start + length - first)
            scored_here = np.flatnonzero(datum.scored)
            scored.append(places[scored_here])
            datum_index.append(np.full(len(scored_here), i))
            datum_position.append(scored_here)
            start += length - first
        documents.append(_tree(firsts, [lengths[i] for i in group.members], opening))
    index, position = np.concatenate(datum_index), np.concatenate(datum_position)
    flat = np.cumsum((0, *lengths))[index] + position
    loss_inputs, (temperatures, kept) = _gathered(datums, flat), _distributions(datums, index, flat)
    of_positions, targets = np.concatenate(scored), loss_inputs["target_tokens"]
    sets = () if kept is None else (kept.numbers(),)
    pairs, pair_index = _distinct_pairs(of_positions, targets, temperatures, *sets)
    return PackedRow(
        tokens=np.concatenate([datums[i].tokens[part] for i, part in pieces]),
        positions=np.concatenate([np.arange(lengths[i])[part] for i, part in pieces]),
        documents=tuple(documents),
        lengths=tuple(lengths),
        scored=of_positions[pairs],
        targets=targets[pairs],
        temperatures=temperatures[pairs],
        kept=None if kept is None else kept.take(pairs),
        routes=joined_routes([r if (r := datums[i].routes) is None else r[part] for i, part in pieces]),
        pair_index=pair_index,
        datum_index=index,
        datum_position=position,
        loss_inputs=loss_inputs,
        images=tuple(images),
    )


def pad_row(row: PackedRow, multiple: int) -> PackedRow:
    """Pads a row to a multiple of `multiple` tokens with documents that have no scored position.

    They are no longer than the row's longest document, which fits the model's context: a row may need more padding.
    """
    missing = -len(row.tokens) % multiple
    if not missing:
        return row
    padding = np.arange(missing)
    longest = min(_PADDING_DOCUMENT, int(row.positions.max()) + 1)
    whole, rest = divmod(missing, longest)
    return replace(
        row,
        tokens=np.concatenate([row.tokens, np.zeros_like(padding)]),
        positions=np.concatenate([row.positions, padding % longest]),
        routes=padded_routes(row.routes, missing),
        documents=(*row.documents, *[Document(longest)] * whole, *[Document(rest)] * (rest > 0)),
    )


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Datums that begin with one shareable prefix, in an order in which datums that begin alike are neighbours."""

    members: tuple[int, ...]
    """Indices of the datums in the batch."""
    shared: tuple[int, ...]
    """For each member, how many of its first tokens it shares with the member before it; 0 for the first.

    Members i < k share as many as the least of `shared[i + 1 : k + 1]`."""

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the group on a packed row. `lengths` holds the number of tokens of every datum of the batch."""
        return sum(lengths[i] - shared for i, shared in zip(self.members, self.shared, strict=True))

    def num_pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of a token there and one that it attends to, itself or before it in its datum."""
        own = zip(self.members, self.shared, strict=True)
        return sum((lengths[i] * (lengths[i] + 1) - shared * (shared + 1)) // 2 for i, shared in own)

    def part(self, start: int, stop: int) -> "PrefixGroup":
        """The group of the members `start` to `stop - 1`."""
        return PrefixGroup(self.members[start:stop], (0, *self.shared[start + 1 : stop]))


def group_by_prefix(batch: Sequence[Datum], *, share_prefixes: bool = True) -> list[PrefixGroup]:
    """Groups the datums that have the same shareable prefix, in the order of each group's first datum.

    A prefix that begins with another datum's belongs to that one's group, as of a later branch of a session. Without
    `share_prefixes` every datum is a group of its own.
    """
    if not share_prefixes:
        return [PrefixGroup((i,), (0,)) for i in range(len(batch))]
    prefixes = [_identity(datum, shareable_prefix(datum)).tobytes() for datum in batch]
    shortest: dict[bytes, bytes] = {}
    current: bytes | None = None
    for prefix in sorted(set(prefixes)):  # all that begin alike follow their common beginning
        current = prefix if current is None or not prefix.startswith(current) else current
        shortest[prefix] = current
    groups: dict[bytes, list[int]] = {}
    for i, prefix in enumerate(prefixes):
        groups.setdefault(shortest[prefix], []).append(i)
    return [_sorted_group(batch, members) for members in groups.values()]


def shareable_prefix(datum: Datum) -> Ints:
    """The tokens that make a datum a member of its group: all up to and including the first position that counts.

    A sampled datum's shareable prefix is its prompt. Without a position that counts it is the whole datum.
    """
    counting = np.flatnonzero(datum.counted)
    return datum.tokens[: counting[0] + 1] if len(counting) else datum.tokens


def common_opening(datums: Sequence[Datum], groups: Sequence[PrefixGroup]) -> int:
    """Number of tokens that all datums begin with and that can be computed once for all; 0 if it is not worth it.

    The last token of a shareable prefix is not among them, so that every group has a token of its own.
    """
    if len(groups) < 2:
        return 0
    prefixes = [_identity(d, shareable_prefix(d)) for d in (datums[group.members[0]] for group in groups)]
    shortest = min(map(len, prefixes)) - 1
    length = min(_num_alike(prefix[:shortest], prefixes[0][:shortest]) for prefix in prefixes)
    return length if length >= _SHORTEST_OPENING else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Floating-point operations of one forward pass over packed rows, in the model's matrix products.

    After PaLM (https://arxiv.org/abs/2204.02311), appendix B: two for each weight and token, and the products of
    attention. Counted is what the result needs: causal pairs of positions only, a shared prefix once, the output layer
    at scored positions only. What an engine computes twice to save memory does not count.
    """

    per_token: float
    """Of all layers, without attention's products of queries, keys and values."""
    per_scored: float
    """Operations of the output layer for one scored position."""
    per_pair: float
    """Of attention in all layers, for a position and another that it attends to."""
    frozen: bool = False
    """Whether only an adapter is trained, so that the weights need no gradient."""

    @classmethod
    def of(cls, model: Path, head: Head = "lm", *, frozen: bool = False) -> "ModelFlops":
        """The operations of the model in a directory. Raises ValueError if its `config.json` is missing or no JSON.

        An architecture that names its sizes in its own way, as GPT-2 does, or whose layers have other products
        counts 0, and its runs report no `mfu`.
        """
        config = read_config(model)
        if any(config.get(name) is None for name in _SIZES) or any(config.get(name) for name in _OTHER_ATTENTION):
            return cls(per_token=0.0, per_scored=0.0, per_pair=0.0, frozen=frozen)
        hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        head_size = config.get("head_dim") or hidden // heads
        key_value_heads = config.get("num_key_value_heads") or heads
        attention = 2 * hidden * head_size * (heads + key_value_heads)
        return cls(
            per_token=2.0 * (layers * attention + _feed_forward(config)),
            per_scored=2.0 * hidden * (config["vocab_size"] if head == "lm" else 1),
            per_pair=4.0 * layers * heads * head_size,
            frozen=frozen,
        )

    def forward(self, row: PackedRow) -> float:
        """Operations of a forward pass over the row."""
        return self._linear(len(row.tokens), len(row.scored)) + self.per_pair * _num_pairs(row)

    def training(self, row: PackedRow) -> float:
        """Operations of a forward and a backward pass over the row. An adapter's few do not count."""
        return self.training_of(len(row.tokens), len(row.scored), _num_pairs(row))

    def training_of(self, num_tokens: int, num_scored: int, num_pairs: float) -> float:
        """The same of a row that has so many tokens, scored positions, and pairs of a token and one it attends to."""
        return (2 if self.frozen else 3) * self._linear(num_tokens, num_scored) + 3 * self.per_pair * num_pairs

    def _linear(self, num_tokens: int, num_scored: int) -> float:
        return self.per_token * num_tokens + self.per_scored * num_scored


def _num_pairs(row: PackedRow) -> float:
    return float(row.positions.sum() + len(row.positions))  # a token attends to itself and all before it


def _tree(firsts: Sequence[int], lengths: Sequence[int], opening: int) -> Document:
    """The document of a group. Each member adds its tokens from `firsts` on; those before it are the members' before.

    A member's tokens are cut where a later member branches off.
    """
    cuts: list[list[int]] = []
    ahead: list[int] = []  # where the members that come later branch off what comes before them, the last the nearest
    for first in reversed(firsts):
        own: list[int] = []
        while ahead and ahead[-1] >= first:
            own.append(ahead.pop())
        ahead.append(first)
        cuts.append(own[::-1])
    sizes: list[int] = []
    depths: list[int] = []
    path: list[tuple[int, int]] = []  # for each segment that comes before the next: its end and its depth
    for first, length, own in zip(firsts, lengths, reversed(cuts), strict=True):
        while path and path[-1][0] > first:
            path.pop()
        for start, stop in itertools.pairwise(sorted({first, *own, length})):
            path.append((stop, len(path)))
            sizes.append(stop - start)
            depths.append(path[-1][1])
    branches = tuple(depths[1:])
    return Document(sizes[0], tuple(sizes[1:]), opening, branches if any(depth > 1 for depth in branches) else ())


def _distinct_pairs(scored: Ints, *others: np.ndarray) -> tuple[Ints, Ints]:
    """Tokens of the row, and what else distinguishes pairs, [S] each -> a position of each pair [P], pairs of all [S].

    Pairs are in the order of the row.
    """
    key = scored
    for other in others:
        values, index = np.unique(other, return_inverse=True)
        key = key * len(values) + index
    _, first, pair_index = np.unique(key, return_index=True, return_inverse=True)
    return first, pair_index


def _gathered(datums: Sequence[Datum], flat: Ints) -> dict[str, np.ndarray]:
    """The loss inputs of positions, which are indices into the concatenation of all datums."""
    names = datums[0].loss_inputs.keys() - {"weights"}
    return {
        "weights": np.concatenate([datum.weights for datum in datums])[flat],
        **{name: np.concatenate([datum.loss_inputs[name] for datum in datums])[flat] for name in names},
    }


def _distributions(datums: Sequence[Datum], index: Ints, flat: Ints) -> tuple[NDArray[np.float32], KeptSets | None]:
    """Temperatures and kept sets of positions, by the index of their datum, and in the concatenation of all datums."""
    temperatures = np.array([datum.temperature for datum in datums], dtype=np.float32)[index]
    if all(datum.kept is None for datum in datums):
        return temperatures, None
    kept = KeptSets.joined([datum.kept or KeptSets.whole(len(datum.tokens)) for datum in datums])
    return temperatures, kept.take(flat)


def _sorted_group(batch: Sequence[Datum], members: Sequence[int]) -> PrefixGroup:
    # In any order by the first difference, such as that of bytes, sequences that begin alike are neighbours.
    if len(members) > 1:
        members = sorted(members, key=lambda i: _identity(batch[i], batch[i].tokens).tobytes())
    tokens = [_identity(batch[i], batch[i].tokens) for i in members]
    shared = (_num_alike(a, b) for a, b in itertools.pairwise(tokens))
    return PrefixGroup(tuple(members), (0, *shared))


def _identity(datum: Datum, tokens: Ints) -> np.ndarray:
    """[n, ...] for the first n tokens of a datum, what others must have in common: the id, and the experts if any."""
    if datum.routes is None:
        return tokens[:, None]
    both = (np.ascontiguousarray(part) for part in (tokens, datum.routes[: len(tokens)]))
    return np.concatenate([part.view(np.uint8).reshape(len(part), -1) for part in both], axis=1)


def _num_alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with in common."""
    shortest = min(len(a), len(b))
    different = (a[:shortest] != b[:shortest]).any(1)
    first = int(different.argmax()) if shortest else 0
    return first if shortest and different[first] else shortest


def _feed_forward(config: Mapping[str, Any]) -> int:
    """Weights of all layers' feed-forward networks that a token is multiplied with."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense: int = 3 * hidden * config["intermediate_size"]
    if (count := num_experts(config)) == 0:
        return layers * dense
    in_use = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    first = config.get("first_k_dense_replace") or 0  # layers without experts
    return first * dense + (layers - first) * (3 * hidden * in_use * width + hidden * count)
