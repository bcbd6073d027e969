import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.rollouts.columns import count_groups, groups_to_table, parquet_bytes, read_groups, table_to_groups
from rl.sampling import KeptSets, Routes
from rl.types import Completion, FinishReason, Group, Rollout, Turn
from tests.rl.fakes import completion, single_turn

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TOKEN = st.integers(0, 2**31 - 1)
NUMBER = st.floats(allow_nan=False)
LOGPROB = st.floats(allow_nan=False, width=32)
WORDS = st.sets(st.integers(0, 1 << 17), max_size=3).map(sorted)
ROUTES = st.none() | st.builds(
    lambda sizes, dtype: Routes(*(np.arange(n * 6, dtype=dtype).reshape(n, 3, 2) for n in sizes)),
    st.tuples(st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from([np.uint8, np.uint16]),
)
REASON: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length"])


@st.composite
def turns(draw: Callable[..., int]) -> Turn:
    """A turn of up to five tokens."""
    size = draw(st.integers(0, 5))

    def many(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))  # type: ignore[arg-type]

    sampled = Completion(
        tokens=many(TOKEN),  # pyright: ignore[reportArgumentType]
        logprobs=many(LOGPROB),
        versions=many(TOKEN),  # pyright: ignore[reportArgumentType]
        text=draw(TEXT),  # pyright: ignore[reportArgumentType]
        finish_reason=draw(REASON),  # pyright: ignore[reportArgumentType]
        temperature=draw(NUMBER),  # pyright: ignore[reportArgumentType]
        kept=draw(st.none() | st.lists(WORDS, min_size=size, max_size=size).map(KeptSets.of)),  # pyright: ignore[reportArgumentType]
        routes=draw(ROUTES),  # pyright: ignore[reportArgumentType]
        prompt_logprobs=draw(st.none() | st.lists(LOGPROB, max_size=3).map(tuple)),  # pyright: ignore[reportArgumentType]
    )
    prompt = draw(st.lists(TOKEN, max_size=4))
    return Turn(prompt_tokens=tuple(prompt), completion=sampled, prompt=draw(TEXT))  # pyright: ignore


ROLLOUTS = st.builds(
    Rollout,
    turns=st.lists(turns(), min_size=1, max_size=3).map(tuple),
    reward=NUMBER,
    metrics=st.dictionaries(TEXT, NUMBER, max_size=3),
    out_of_context=st.booleans(),
    environment_s=NUMBER,
)
GROUPS = st.builds(
    Group,
    problem_id=TEXT,
    prompt=TEXT,
    rollouts=st.lists(ROLLOUTS, min_size=1, max_size=3).map(tuple),
    failures=st.lists(TEXT, max_size=2).map(tuple),
    number=st.none() | TOKEN,
)


@pytest.mark.seconds
@settings(max_examples=60, deadline=None)
@given(st.lists(GROUPS, max_size=3))
def test_groups_come_back_as_they_were(groups: list[Group]) -> None:
    back = table_to_groups(pq.read_table(pa.BufferReader(parquet_bytes(groups_to_table(groups)))))
    assert [group.number for group in back] == [group.number for group in groups]
    assert back == groups
    seconds = [[rollout.environment_s for rollout in group.rollouts] for group in back]  # which == leaves out
    assert seconds == [[rollout.environment_s for rollout in group.rollouts] for group in groups]


def _two_turns() -> Group:
    """A group of two rollouts, the first of two turns."""
    answers = [completion("ab", version=3), completion("c", version=4)]
    played = tuple(Turn(prompt_tokens=(5 + i,), completion=a, prompt=f"try {i}") for i, a in enumerate(answers))
    long = Rollout(turns=played, reward=0.1 + 0.2, metrics={"tries": 2.0}, out_of_context=True, environment_s=1.5)
    return Group(
        problem_id="p", prompt="2+2?", rollouts=(long, single_turn((1, 2), answers[0], reward=-1.0)), failures=("hung",)
    )


def test_another_reader_finds_every_field(tmp_path: Path) -> None:
    import pandas as pd  # takes a second

    group = _two_turns()
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(groups_to_table([group])))
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert frame["reward"].tolist() == [0.1 + 0.2, -1.0]
    assert frame["truncated"].tolist() == [True, False]
    assert frame["prompt"].tolist() == ["2+2?", "2+2?"]
    assert frame["sample"].tolist() == [0, 1]
    assert [list(failures) for failures in frame["group_failures"]] == [["hung"], ["hung"]]
    assert dict(frame["metrics"][0]) == {"tries": 2.0}
    for turn, row in zip(group.rollouts[0].turns, frame["turns"][0], strict=True):
        assert (row["prompt"], row["text"]) == (turn.prompt, turn.completion.text)
        assert row["prompt_tokens"].tolist() == list(turn.prompt_tokens)
        assert row["tokens"].tolist() == list(turn.completion.tokens)
        assert row["logprobs"].tolist() == list(turn.completion.logprobs)
        assert row["logprobs"].dtype == np.float32
        assert row["versions"].tolist() == list(turn.completion.versions)


def test_log_probs_are_those_of_float32_to_the_last_bit() -> None:
    values = np.random.default_rng(0).exponential(1, 1000).astype(np.float32)
    values[:4] = [0, -0.0, np.inf, np.finfo(np.float32).tiny / 4]
    logprobs = tuple((-values).tolist())
    numbers = tuple(range(len(logprobs)))
    sampled = Completion(tokens=numbers, logprobs=logprobs, versions=numbers, text="", finish_reason="stop")
    group = Group(problem_id="p", prompt="", rollouts=(single_turn((1,), sampled, reward=math.inf),))
    (back,) = table_to_groups(groups_to_table([group]))
    found = np.array(back.rollouts[0].turns[0].completion.logprobs, dtype=np.float32)
    assert found.tobytes() == (-values).tobytes()


def test_groups_of_one_problem_stay_apart() -> None:
    failed = Group(problem_id="p", prompt="", rollouts=(), failures=("it hung",))
    groups = [_two_turns(), failed, _two_turns()]
    assert table_to_groups(groups_to_table(groups)) == [groups[0], groups[2]]


def test_half_a_surrogate_pair_does_not_cost_the_run() -> None:
    group = Group(problem_id="p", prompt="a\ud800b", rollouts=(single_turn((1,), completion("x"), reward=1.0),))
    assert table_to_groups(groups_to_table([group]))[0].prompt == "a\\ud800b"


def test_a_file_that_another_tool_wrote_anew_is_read(tmp_path: Path) -> None:
    table = groups_to_table([_two_turns()])
    wide = table.cast(pa.schema([f.with_type(pa.int64()) if f.type == pa.int32() else f for f in table.schema]))
    pq.write_table(wide.append_column("mine", pa.array([1, 2])), tmp_path / "a.parquet")
    assert read_groups(tmp_path / "a.parquet") == [_two_turns()]
    assert count_groups(tmp_path / "a.parquet") == 1


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the recording .*missing\.parquet cannot be read: No such file"):
        read_groups(tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("not Parquet")
    with pytest.raises(ValueError, match=r"text\.parquet is not a recording of rollouts: "):
        read_groups(tmp_path / "text.parquet")
    whole = parquet_bytes(groups_to_table([_two_turns()])).to_pybytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.parquet is not a recording of rollouts: "):
        count_groups(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"reward": [1.0]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other\.parquet is not a recording of rollouts: it has no column 'group'"):
        read_groups(tmp_path / "other.parquet")
