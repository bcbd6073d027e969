from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.batching import checked_data, merge_metrics, plan_batch, validate_batch
from rl.data.packing import ModelFlops, pack_row
from rl.sampling import KeptSets
from rl.types import Datum


def _datum(prompt: int, length: int, group: int, sample: int = 0) -> Datum:
    completion = np.arange(length) + 100 * (1 + sample)
    tokens = np.concatenate([np.full(prompt, group), completion]).astype(np.int64)
    weights = (np.arange(len(tokens)) >= prompt - 1).astype(np.float32)
    return Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": weights})


BATCHES = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=24
).map(lambda rows: [_datum(*row) for row in rows])


@given(BATCHES, st.integers(1, 4), st.integers(1, 120), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_datum_is_planned_once_within_the_budget(
    batch: list[Datum], num_ranks: int, budget: int, share: bool
) -> None:
    plan = plan_batch(batch, num_ranks=num_ranks, max_tokens_per_microbatch=budget, share_prefixes=share)
    assert sorted(i for rank in plan.microbatches for m in rank for i in m) == list(range(len(batch)))
    assert len({len(rank) for rank in plan.microbatches}) == 1
    for rank in plan.split(batch):
        for microbatch in rank:
            if microbatch:
                tokens = len(pack_row(microbatch, share_prefixes=share).tokens)
                assert tokens <= budget or all(len(datum.tokens) == tokens for datum in microbatch)
    results = [[i for m in rank for i in m] for rank in plan.microbatches]
    assert plan.restore(results) == tuple(range(len(batch)))


def test_ranks_share_the_tokens_evenly() -> None:
    rng = np.random.default_rng(0)
    batch = [_datum(int(rng.integers(10, 200)), int(rng.integers(1, 100)), i) for i in range(64)]
    plan = plan_batch(batch, num_ranks=4, max_tokens_per_microbatch=512, share_prefixes=True)
    loads = [sum(len(d.tokens) for m in rank for d in m) for rank in plan.split(batch)]
    assert max(loads) <= 1.05 * np.mean(loads)


@pytest.mark.parametrize("share", [False, True])
def test_ranks_that_wait_for_each_other_share_the_operations(share: bool) -> None:
    """By rows as they are packed: a long document takes more operations than short ones of as many tokens."""
    lengths = np.random.default_rng(0).lognormal(7, 1, 128).clip(50, 8000).astype(int)
    batch = [_datum(40, int(length), i, i) for i, length in enumerate(lengths)]
    flops = ModelFlops(per_token=9e8, per_scored=3e8, per_pair=2.3e5)

    def waited(counted: ModelFlops | None) -> float:
        """The operations of each step's slowest rank, over those of a rank that never waits."""
        plan = plan_batch(batch, num_ranks=8, max_tokens_per_microbatch=16384, share_prefixes=share, flops=counted)
        rows = [[pack_row(members, share_prefixes=share) for members in rank] for rank in plan.split(batch)]
        operations = np.array([[flops.training(row) for row in rank] for rank in rows])
        return float(operations.max(0).sum() / operations.sum(1).mean())

    assert waited(flops) < 1.01
    assert waited(None) > 1.05
    alone = partial(plan_batch, batch, num_ranks=1, max_tokens_per_microbatch=9000, share_prefixes=share)
    assert alone(flops=flops) == alone()


def test_one_large_group_is_cut_so_that_no_rank_is_idle() -> None:
    batch = [_datum(50, 40, 0, sample) for sample in range(8)]
    plan = plan_batch(batch, num_ranks=2, max_tokens_per_microbatch=10_000, share_prefixes=True)
    assert [sum(map(len, rank)) for rank in plan.microbatches] == [4, 4]


def test_completions_that_begin_alike_go_to_the_same_rank() -> None:
    batch = [_datum(50, 40, 0, sample // 4) for sample in (0, 4, 1, 5, 2, 6, 3, 7)]
    plan = plan_batch(batch, num_ranks=2, max_tokens_per_microbatch=10_000, share_prefixes=True)
    assert {frozenset(members) for (members,) in plan.microbatches} == {
        frozenset({0, 2, 4, 6}),
        frozenset({1, 3, 5, 7}),
    }
    for ((*members,),) in plan.split(batch):
        assert len(pack_row(members, share_prefixes=True).tokens) == 90


def test_sharing_needs_fewer_microbatches() -> None:
    batch = [_datum(50, 5, i % 2, i) for i in range(16)]
    whole = plan_batch(batch, num_ranks=1, max_tokens_per_microbatch=200, share_prefixes=False)
    shared = plan_batch(batch, num_ranks=1, max_tokens_per_microbatch=200, share_prefixes=True)
    assert len(whole.microbatches[0]) >= 5
    assert len(shared.microbatches[0]) == 1


def _valid() -> Datum:
    return Datum(
        tokens=np.array([1, 2, 3]),
        loss_inputs={"target_tokens": np.array([2, 3, 4]), "logprobs": np.zeros(3, dtype=np.float32)},
    )


def _with(name: str, values: Any) -> Datum:
    return replace(_valid(), loss_inputs={**_valid().loss_inputs, name: values})


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (
            Datum(tokens=np.array([], dtype=np.int64), loss_inputs=_valid().loss_inputs),
            r"batch\[1\].tokens has length 0",
        ),
        (Datum(tokens=np.array([1.0, 2, 3]), loss_inputs=_valid().loss_inputs), r"batch\[1\].tokens.*float64; int64"),  # pyright: ignore[reportArgumentType]
        (Datum(tokens=np.array([1, 2, 99]), loss_inputs=_valid().loss_inputs), r"batch\[1\].tokens\[2\] is 99"),
        (
            Datum(tokens=np.arange(2), loss_inputs=_valid().loss_inputs),
            r"batch\[1\].loss_inputs\['target_tokens'\] has length 3; batch\[1\].tokens has length 2",
        ),
        (
            Datum(tokens=np.arange(3), loss_inputs={"target_tokens": np.arange(3)}),
            r"batch\[1\].loss_inputs lacks 'logprobs'",
        ),
        (
            Datum(tokens=np.arange(3), loss_inputs={**_valid().loss_inputs, "logprobs": np.array([0, np.nan, 0])}),
            r"batch\[1\].loss_inputs\['logprobs'\]\[1\] is nan",
        ),
        (
            Datum(tokens=np.arange(3), loss_inputs={**_valid().loss_inputs, "extra": np.zeros(3)}),
            r"batch\[0\].loss_inputs has \['logprobs', 'target_tokens'\]",
        ),
        (Datum(tokens=np.arange(40) % 9, loss_inputs=_valid().loss_inputs), "between 1 and 32 tokens"),
        (replace(_valid(), kept=KeptSets.whole(2)), r"batch\[1\].kept has 2 sets; there are 3 tokens"),
        (replace(_valid(), routes=np.zeros((3, 1, 1), np.uint8)), r"batch\[1\] and batch\[0\] differ in having routes"),
        (replace(_valid(), temperature=0.0), r"batch\[1\].temperature is 0.0; it must be finite and above 0"),
        (replace(_valid(), temperature=1e300), r"batch\[1\].temperature is 1e\+300; it must be finite and above 0"),
        (replace(_valid(), temperature=cast("float", "1")), r"batch\[1\].temperature is '1'"),
        (replace(_valid(), loss_inputs=cast("Any", [1])), r"batch\[1\].loss_inputs is \[1\]"),
        (replace(_valid(), kept=cast("Any", [1])), r"batch\[1\].kept is \[1\]"),
        (
            _with("logprobs", np.array([0, 1e300, 0])),
            r"\['logprobs'\]\[1\] is 1e\+300; every value must be finite, in fl",
        ),
        (_with("logprobs", np.zeros(3, np.longdouble)), r"has dtype float128; numbers of at most 64 bits are expected"),
        (_with("logprobs", np.ma.masked_array(np.zeros(3), [0, 1, 0])), r"\['logprobs'\] is a MaskedArray of shape"),
    ],
)
def test_mistakes_name_the_datum_and_the_field(datum: Datum, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_batch([_valid(), datum], required_inputs=("logprobs",), vocab_size=50, max_seq_len=32)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs"])
def test_a_log_prob_is_at_most_0_but_for_rounding(name: str) -> None:
    for value in (0.0, 1e-4):
        validate_batch([_with(name, np.array([-1, value, 0], np.float32))], vocab_size=50, max_seq_len=32)
    with pytest.raises(ValueError, match=rf"batch\[0\].loss_inputs\['{name}'\]\[1\] is 0.5; a log-prob is at most 0"):
        validate_batch([_with(name, np.array([-1, 0.5, 0], np.float32))], vocab_size=50, max_seq_len=32)


@pytest.mark.parametrize(
    ("experts", "message"), [(None, "have no experts to choose"), ((1, 2, 4), "has the expert 1 twice")]
)
def test_routes_that_no_layer_can_take_are_named(experts: tuple[int, int, int] | None, message: str) -> None:
    batch = [replace(_valid(), routes=np.ones((3, 1, 2), np.uint8))]
    with pytest.raises(ValueError, match=rf"batch\[0\]\.routes .*{message}"):
        validate_batch(batch, vocab_size=50, max_seq_len=32, experts=experts)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", "int8", "uint64", "bool"])
def test_numbers_may_have_any_dtype_but_a_mask_is_bool(dtype: str) -> None:
    validate_batch([_with("advantages", np.ones(3, dtype))], vocab_size=50, max_seq_len=32)
    expected = nullcontext() if dtype == "bool" else pytest.raises(ValueError, match=r"'reported_mask'\] has dtype")
    with expected:
        validate_batch([_with("reported_mask", np.ones(3, dtype))], vocab_size=50, max_seq_len=32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_valid(), "batch is a Datum; it must be a sequence of Datums"),
        (None, "batch is a NoneType; it must be"),
        ([_valid(), None], r"batch\[1\] is a NoneType; it must be a Datum"),
        ([{"tokens": [1]}], r"batch\[0\] is a dict; it must be a Datum"),
        ("ab", r"batch\[0\] is a str; it must be a Datum"),
        ([], "batch is empty"),
    ],
)
def test_a_batch_holds_datums_only(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_data(batch)


def test_a_valid_batch_passes_and_an_empty_one_does_not() -> None:
    validate_batch([_valid()], required_inputs=("logprobs",), vocab_size=50, max_seq_len=32)
    with pytest.raises(ValueError, match="batch is empty"):
        validate_batch([], vocab_size=50, max_seq_len=32)


def test_metrics_merge_by_their_names() -> None:
    merged = merge_metrics([{"loss": 1.0, "ratio_max": 2.0, "ratio_min": 0.5}, {"loss": 2.0, "ratio_max": 1.5}])
    assert merged == {"loss": 3.0, "ratio_max": 2.0, "ratio_min": 0.5}
