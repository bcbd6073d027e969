from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.packing import Document, group_by_prefix, pack_row, pad_row
from rl.sampling import KeptSets
from rl.types import Datum
from tests.rl.data.row_definition import attended

SIZES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


def _datum(prompt: list[int], completion: list[int]) -> Datum:
    tokens = np.array(prompt + completion, dtype=np.int64)
    weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "weights": weights, "advantages": tokens[1:].astype(np.float32) / 7}
    return Datum(tokens=tokens[:-1], loss_inputs=inputs)


def _batch(sizes: list[tuple[int, list[int]]], seed: int, opening: int = 0, num_words: int = 1000) -> list[Datum]:
    rng = np.random.default_rng(seed)
    batch = [
        _datum(
            [*range(5000, 5000 + opening), *(100 * g + k for k in range(p))],
            rng.integers(1000, 1000 + num_words, n).tolist(),
        )
        for g, (p, completions) in enumerate(sizes)
        for n in completions
    ]
    batch = [replace(batch[i], temperature=rng.choice([0.5, 1.0])) for i in rng.permutation(len(batch))]
    return [_cut(datum, int(rng.integers(3))) for datum in batch]


def _cut(datum: Datum, number: int) -> Datum:
    """The datum as if its tokens were sampled from a set of two or three words, or from all."""
    sets = [[1, 6000, 6001][3 - number :] if number > 1 else [] for _ in datum.tokens]
    return replace(datum, kept=KeptSets.of(sets) if number else None)


WORDS = st.sampled_from([1, 2, 1000])
"""How many different tokens completions have: of few, many begin alike or are the same."""


def _tree_size(batch: list[Datum]) -> int:
    """Number of different beginnings that the datums have."""
    return len({tuple(datum.tokens[: k + 1]) for datum in batch for k in range(len(datum.tokens))})


@given(SIZES, st.integers(0, 2**16), st.booleans(), st.sampled_from([0, 7, 8, 12]), WORDS)
@settings(max_examples=100, deadline=None)
def test_every_scored_position_sees_exactly_its_own_datum(
    sizes: list[tuple[int, list[int]]], seed: int, share: bool, opening: int, num_words: int
) -> None:
    batch = _batch(sizes, seed, opening, num_words)
    row = pack_row(batch, share_prefixes=share, share_opening=True)
    if share and len(sizes) > 1:
        assert row.documents[-1].opening == (opening if opening >= 8 else 0)
        assert np.isin(np.arange(5000, 5000 + opening), row.tokens).all()
        assert (row.tokens >= 5000).sum() == (opening if opening >= 8 else opening * len(sizes))
    if share and opening in (0, 8, 12):
        assert len(row.tokens) == _tree_size(batch), "nothing is computed twice"
    assert sum(d.num_tokens for d in row.documents) == len(row.tokens) == len(row.positions)
    assert len(row.pair_index) == sum(d.num_loss_tokens for d in batch)
    kept = row.kept or KeptSets.whole(len(row.scored))
    pairs = {*zip(row.scored, row.targets, row.temperatures, kept.numbers(), strict=True)}
    assert len(pairs) == len(row.scored) == len({*row.pair_index})
    sees = attended(row.documents)
    for k, index in enumerate(row.scored[row.pair_index]):
        datum, position = batch[row.datum_index[k]], int(row.datum_position[k])
        assert row.tokens[sees[index]].tolist() == datum.tokens[: position + 1].tolist()
        assert row.positions[index] == position
        assert row.targets[row.pair_index[k]] == datum.loss_inputs["target_tokens"][position]
        assert row.temperatures[row.pair_index[k]] == datum.temperature
        of_datum = datum.kept or KeptSets.whole(len(datum.tokens))
        assert kept.take(row.pair_index[k : k + 1]) == of_datum.part(position, position + 1)
        assert row.loss_inputs["target_tokens"][k] == datum.loss_inputs["target_tokens"][position]
        assert row.loss_inputs["advantages"][k] == datum.loss_inputs["advantages"][position]
    unpacked = row.unpack(row.loss_inputs["advantages"])
    for datum, values in zip(batch, unpacked, strict=True):
        np.testing.assert_array_equal(values, datum.loss_inputs["advantages"] * (datum.weights != 0))


@given(SIZES, st.integers(0, 2**16), st.booleans(), st.sampled_from([0, 12]), WORDS)
@settings(max_examples=60, deadline=None)
def test_reported_positions_are_shared_and_come_back(
    sizes: list[tuple[int, list[int]]], seed: int, other_target: bool, opening: int, num_words: int
) -> None:
    plain = _batch(sizes, seed, opening, num_words)
    batch = [_reported(datum, other_target and index == 0) for index, datum in enumerate(plain)]
    row = pack_row(batch, share_prefixes=True, share_opening=True)
    assert len(row.tokens) == len(pack_row(plain, share_prefixes=True, share_opening=True).tokens)
    assert len({*zip(row.datum_index, row.datum_position, strict=True)}) == len(row.pair_index)
    sees = attended(row.documents)
    # A value that only the tokens before and the target decide, as a log-prob is.
    seen = [tuple(row.tokens[sees[index]].tolist()) for index in row.scored]
    values = np.array([hash(pair) % 9973 for pair in zip(seen, row.targets.tolist(), strict=True)], np.float32)
    found = row.unpack(values[row.pair_index])
    for datum, of_datum in zip(batch, found, strict=True):
        tokens, targets = datum.tokens.tolist(), datum.loss_inputs["target_tokens"].tolist()
        expected = [hash((tuple(tokens[: k + 1]), target)) % 9973 for k, target in enumerate(targets)]
        assert of_datum.tolist() == expected


def _reported(datum: Datum, other_target: bool) -> Datum:
    """The datum with log-probs of the prompt wanted; `other_target` changes the first target."""
    inputs = {**datum.loss_inputs, "reported_mask": ~datum.counted}
    if other_target:
        inputs["target_tokens"] = np.concatenate([[7], datum.loss_inputs["target_tokens"][1:]])
    return Datum(tokens=datum.tokens, loss_inputs=inputs)


def test_tokens_of_other_experts_are_not_shared() -> None:
    """The last datum's third token went to another expert, so its prefix is not the others'."""
    batch = [_datum([1, 2, 3], [4, 5]), _datum([1, 2, 3], [4, 6]), _datum([1, 2, 3], [4, 7])]
    experts = np.array([[3], [3], [3]]), np.array([[3], [4], [3]]), np.array([[9], [3], [3]])
    routes = [
        np.concatenate([np.array([[1], [2]]), each])[: len(d.tokens), :, None]
        for each, d in zip(experts, batch, strict=True)
    ]
    batch = [replace(datum, routes=each.astype(np.uint16)) for datum, each in zip(batch, routes, strict=True)]
    row = pad_row(pack_row(batch, share_prefixes=True), 4)
    assert row.routes is not None
    assert row.tokens.tolist() == [1, 2, 3, 4, 4, 1, 2, 3, 4, *[0] * 3]
    assert row.routes[:, 0, 0].tolist() == [1, 2, 3, 3, 4, 1, 2, 9, 3, *[0] * 3]


def test_what_datums_share_is_in_the_row_once() -> None:
    batch = [_datum([1, 2, 3], [4, 5]), _datum([9, 8], [7]), _datum([1, 2, 3], [6]), _datum([1, 2, 3], [5, 4, 4])]
    row = pack_row(batch, share_prefixes=True)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 4, 9, 8]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert row.documents == (Document(3, (1, 2)), Document(2))
    assert list(zip(row.scored, row.targets, strict=True)) == [(2, 4), (2, 5), (2, 6), (3, 5), (4, 4), (5, 4), (7, 7)]
    assert row.datum_index.tolist() == [2, 0, 0, 3, 3, 3, 1]
    assert row.pair_index.tolist() == [2, 0, 3, 1, 4, 5, 6]
    whole = pack_row(batch, share_prefixes=False)
    assert whole.documents == (Document(4), Document(2), Document(3), Document(5))


def test_completions_that_begin_alike_are_a_tree() -> None:
    completions = [[4, 5, 6, 0], [4, 5, 7, 0], [4, 8, 0], [4, 5, 6, 0], [3, 0], [4, 5, 6, 9, 0]]
    row = pack_row([_datum([1, 2], completion) for completion in completions], share_prefixes=True)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 7, 8]
    assert row.documents == (Document(2, (1,) * 7, depths=(1, 1, 2, 3, 4, 3, 2)),)
    scored = list(zip(row.scored, row.targets, strict=True))
    assert scored == [(1, 3), (1, 4), (2, 0), (3, 5), (3, 8), (4, 6), (4, 7), (5, 0), (5, 9), (6, 0), (7, 0), (8, 0)]
    assert len(row.pair_index) == sum(map(len, completions))


def test_a_datum_joins_the_shortest_prefix_that_it_begins_with() -> None:
    late = Datum(
        tokens=np.array([1, 2, 3]),
        loss_inputs={"target_tokens": np.array([2, 3, 4]), "weights": np.array([0, 1, 1], dtype=np.float32)},
    )
    early = Datum(tokens=np.array([1, 2, 3]), loss_inputs={"target_tokens": np.array([2, 3, 4])})
    other = Datum(tokens=np.array([2, 2, 3]), loss_inputs=late.loss_inputs)
    assert [group.members for group in group_by_prefix([late, other, early, late])] == [(0, 2, 3), (1,)]


def test_a_group_counts_what_its_members_share_once() -> None:
    batch = [_datum([1, 2], completion) for completion in ([4, 5, 0], [3, 0], [4, 6, 0], [4, 5, 0])]
    (group,) = group_by_prefix(batch)
    lengths = [len(datum.tokens) for datum in batch]
    assert [batch[i].tokens.tolist() for i in group.members] == [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5], [1, 2, 4, 6]]
    assert group.shared == (0, 2, 4, 3)
    assert group.num_tokens(lengths) == 6
    assert group.part(2, 4).num_tokens(lengths) == 5


def test_padding_adds_a_document_that_holds_nothing_to_score() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, 5)
    row = pack_row([Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})], share_prefixes=True)
    padded = pad_row(row, 4)
    assert padded.tokens.tolist() == [*tokens, 0, 0, 0]
    assert padded.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert padded.documents == (Document(5), Document(3))
    assert (padded.scored.tolist(), padded.lengths) == (row.scored.tolist(), (5,))
    assert pad_row(row, 5) is row


@pytest.mark.parametrize(("length", "multiple", "padding"), [(200, 500, [128, 128, 44]), (5, 22, [5, 5, 5, 2])])
def test_positions_of_padding_stay_within_a_context(length: int, multiple: int, padding: list[int]) -> None:
    tokens = np.arange(length)
    row = pack_row([Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})], share_prefixes=True)
    padded = pad_row(row, multiple)
    assert padded.documents == tuple(map(Document, [length, *padding]))
    assert padded.positions.tolist() == [*tokens, *(p for each in padding for p in range(each))]
