import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.packing import Document, PackedRow, group_by_prefix, pack_row, pad_row
from rl.types import REPORTED_WEIGHT, Datum

SIZES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


def _datum(prompt: list[int], completion: list[int]) -> Datum:
    tokens = np.array(prompt + completion, dtype=np.int64)
    weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "weights": weights, "advantages": tokens[1:].astype(np.float32) / 7}
    return Datum(tokens=tokens[:-1], loss_inputs=inputs)


def _batch(sizes: list[tuple[int, list[int]]], seed: int, opening: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    batch = [
        _datum([*range(5000, 5000 + opening), *(100 * g + k for k in range(p))], rng.integers(1000, 2000, n).tolist())
        for g, (p, completions) in enumerate(sizes)
        for n in completions
    ]
    return [batch[i] for i in rng.permutation(len(batch))]


def _seen(row: PackedRow, index: int) -> list[int]:
    """The tokens that a position of the row attends to, by the definition of opening, prefix and suffix."""
    start = 0
    for document in row.documents:
        prefix_end = start + document.prefix
        opening = row.tokens[: document.opening].tolist()
        if index < prefix_end:
            return [*opening, *row.tokens[start : index + 1].tolist()]
        suffix_start = prefix_end
        for size in document.suffixes:
            if index < suffix_start + size:
                return [
                    *opening,
                    *row.tokens[start:prefix_end].tolist(),
                    *row.tokens[suffix_start : index + 1].tolist(),
                ]
            suffix_start += size
        start = suffix_start
    raise AssertionError("outside of the row")


@given(SIZES, st.integers(0, 2**16), st.booleans(), st.sampled_from([0, 7, 8, 12]))
@settings(max_examples=60, deadline=None)
def test_every_scored_position_sees_exactly_its_own_datum(
    sizes: list[tuple[int, list[int]]], seed: int, share: bool, opening: int
) -> None:
    batch = _batch(sizes, seed, opening)
    row = pack_row(batch, share_prefixes=share, share_opening=True)
    if share and len(sizes) > 1:
        assert row.documents[-1].opening == (opening if opening >= 8 else 0)
        assert np.isin(np.arange(5000, 5000 + opening), row.tokens).all()
        assert (row.tokens >= 5000).sum() == (opening if opening >= 8 else opening * len(sizes))
    assert sum(d.num_tokens for d in row.documents) == len(row.tokens) == len(row.positions)
    assert len(row.scored) == sum(d.num_loss_tokens for d in batch)
    for k, index in enumerate(row.scored):
        datum, position = batch[row.datum_index[k]], int(row.datum_position[k])
        assert _seen(row, int(index)) == datum.tokens[: position + 1].tolist()
        assert row.positions[index] == position
        assert row.loss_inputs["target_tokens"][k] == datum.loss_inputs["target_tokens"][position]
        assert row.loss_inputs["advantages"][k] == datum.loss_inputs["advantages"][position]
    unpacked = row.unpack(row.loss_inputs["advantages"])
    for datum, values in zip(batch, unpacked, strict=True):
        np.testing.assert_array_equal(values, datum.loss_inputs["advantages"] * (datum.weights != 0))


@given(SIZES, st.integers(0, 2**16), st.booleans(), st.sampled_from([0, 12]))
@settings(max_examples=60, deadline=None)
def test_what_is_only_reported_is_shared_and_comes_back_for_every_datum(
    sizes: list[tuple[int, list[int]]], seed: int, other_target: bool, opening: int
) -> None:
    plain = _batch(sizes, seed, opening)
    batch = [_reported(datum, other_target and index == 0) for index, datum in enumerate(plain)]
    row = pack_row(batch, share_prefixes=True, share_opening=True)
    if not other_target:
        assert len(row.tokens) == len(pack_row(plain, share_prefixes=True, share_opening=True).tokens)
    assert len({*zip(row.datum_index, row.datum_position, strict=True)}) == len(row.scored)
    for k, index in enumerate(row.scored):
        datum, position = batch[row.datum_index[k]], int(row.datum_position[k])
        assert _seen(row, int(index)) == datum.tokens[: position + 1].tolist()
        assert row.loss_inputs["weights"][k] == datum.weights[position]
    # A value that only the tokens before and the target decide, as a log-prob is.
    values = [hash((tuple(_seen(row, int(i))), row.loss_inputs["target_tokens"][k])) for k, i in enumerate(row.scored)]
    found = row.unpack(np.array([value % 9973 for value in values], np.float32))
    for datum, of_datum in zip(batch, found, strict=True):
        seen = [tuple(datum.tokens[: position + 1].tolist()) for position in range(len(datum.tokens))]
        targets = datum.loss_inputs["target_tokens"]
        assert of_datum.tolist() == [hash((s, t)) % 9973 for s, t in zip(seen, targets, strict=True)]


def _reported(datum: Datum, other_target: bool) -> Datum:
    """The datum with log-probs of the prompt wanted; `other_target` changes the first target."""
    inputs = {**datum.loss_inputs, "weights": np.where(datum.weights == 0, REPORTED_WEIGHT, datum.weights)}
    if other_target:
        inputs["target_tokens"] = np.concatenate([[7], datum.loss_inputs["target_tokens"][1:]])
    return Datum(tokens=datum.tokens, loss_inputs=inputs)


def test_a_shared_prefix_is_in_the_row_once() -> None:
    batch = [_datum([1, 2, 3], [4, 5]), _datum([9, 8], [7]), _datum([1, 2, 3], [6]), _datum([1, 2, 3], [4, 4, 4])]
    row = pack_row(batch, share_prefixes=True)
    assert row.tokens.tolist() == [1, 2, 3, 4, 4, 4, 9, 8]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert row.documents == (Document(3, (1, 0, 2)), Document(2))
    assert row.scored.tolist() == [2, 3, 2, 2, 4, 5, 7]
    assert row.datum_index.tolist() == [0, 0, 2, 3, 3, 3, 1]
    whole = pack_row(batch, share_prefixes=False)
    assert whole.documents == (Document(4), Document(2), Document(3), Document(5))


def test_datums_share_only_what_comes_before_their_first_score() -> None:
    late = Datum(
        tokens=np.array([1, 2, 3]),
        loss_inputs={"target_tokens": np.array([2, 3, 4]), "weights": np.array([0, 1, 1], dtype=np.float32)},
    )
    early = Datum(tokens=np.array([1, 2, 3]), loss_inputs={"target_tokens": np.array([2, 3, 4])})
    assert [group.members for group in group_by_prefix([late, early, late])] == [(0, 2), (1,)]


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


def test_positions_of_padding_stay_within_a_context() -> None:
    tokens = np.arange(5)
    row = pack_row([Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})], share_prefixes=True)
    padded = pad_row(row, 300)
    assert padded.documents == (Document(5), Document(128), Document(128), Document(39))
    starts = np.cumsum([0, 5, 128, 128])
    assert padded.positions.max() == 127
    assert np.flatnonzero(padded.positions == 0).tolist() == starts.tolist()  # kernels tell documents apart by these
    assert sum(document.num_tokens for document in padded.documents) == len(padded.tokens) == 300
    assert pad_row(row, 261).documents == (Document(5), Document(128), Document(128))
