from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.schedules import Schedule, adapted_to_entropy, adapted_to_kl, constant, cosine, linear, warmup, wsd


def test_linear_and_cosine_meet_at_both_ends_and_the_middle() -> None:
    for schedule in (linear(1.0, 0.0, 11), cosine(1.0, 0.0, 11)):
        assert [schedule(s) for s in (0, 5, 10, 99)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert cosine(1.0, 0.0, 11)(2) > linear(1.0, 0.0, 11)(2)


def test_warmup_climbs_to_the_schedule() -> None:
    assert [warmup(constant(4.0), 3)(s) for s in range(5)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert warmup(constant(4.0), 0)(0) == 4.0


def test_wsd_holds_then_falls() -> None:
    values = [wsd(1.0, 0.0, 10, decay_fraction=0.4)(s) for s in range(10)]
    assert values == pytest.approx([1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert [wsd(1.0, 0.0, 3, decay_fraction=0.0)(s) for s in range(5)] == [1] * 5


@pytest.mark.parametrize("make", [linear, cosine, wsd])
@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 50))
@settings(deadline=None)
def test_a_schedule_begins_ends_and_stays_where_it_should(
    make: Callable[..., Schedule], start: float, end: float, num_steps: int
) -> None:
    schedule = make(start, end, num_steps)
    values = [schedule(step) for step in range(num_steps + 3)]
    assert values[0] == pytest.approx(start)
    assert values[max(num_steps - 1, 1) :] == pytest.approx([end] * len(values[max(num_steps - 1, 1) :]))
    assert all(min(start, end) - 1e-9 <= value <= max(start, end) + 1e-9 for value in values)
    assert values == sorted(values, reverse=start > end) or start == pytest.approx(end)


@given(st.floats(0, 1))
@settings(deadline=None)
def test_wsd_starts_at_its_peak_whatever_the_fraction(fraction: float) -> None:
    assert wsd(1.0, 0.0, 7, decay_fraction=fraction)(0) == 1.0


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (constant, {"value": -1e-5}, r"value is -1e-05; it must be finite and at least 0"),
        (constant, {"value": float("nan")}, r"value is nan"),
        (linear, {"start": float("inf"), "end": 0, "num_steps": 3}, r"start is inf"),
        (linear, {"start": 1, "end": 0, "num_steps": 0}, r"num_steps is 0; it must be at least 1"),
        (cosine, {"start": 1, "end": -1, "num_steps": 3}, r"end is -1"),
        (cosine, {"start": 1, "end": 0, "num_steps": -2}, r"num_steps is -2"),
        (wsd, {"peak": -1, "end": 0, "num_steps": 3}, r"peak is -1"),
        (wsd, {"peak": 1, "end": 0, "num_steps": 0}, r"num_steps is 0"),
        (wsd, {"peak": 1, "end": 0, "num_steps": 3, "decay_fraction": 1.5}, r"decay_fraction is 1.5.*in \[0, 1\]"),
        (warmup, {"schedule": constant(1.0), "num_steps": -1}, r"num_steps is -1; it must be at least 0"),
    ],
)
def test_mistakes_are_named(make: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_learning_rate_follows_the_kl() -> None:
    def adapted(learning_rate: float, kl: float) -> float:
        return adapted_to_kl(learning_rate, kl, target=0.01, highest=1e-4)

    assert adapted(6e-5, 0.0151) == pytest.approx(4e-5)
    assert adapted(6e-5, 0.0149) == 6e-5
    assert adapted(6e-5, 0.0067) == 6e-5
    assert adapted(6e-5, 0.0066) == pytest.approx(9e-5)
    assert adapted(8e-5, 0.0) == 1e-4
    # A rate above the highest, of a fork that lowers it for example, comes down whatever the KL.
    assert [adapted(1e-3, kl) for kl in (0.0, 0.01, 0.1)] == [1e-4] * 3
    with pytest.raises(ValueError, match="target is 0; it must be above 0"):
        adapted_to_kl(1e-4, 0.1, target=0, highest=1e-4)


def test_the_entropy_coefficient_follows_its_target() -> None:
    assert adapted_to_entropy(0.01, 0.1, target=0.2) == pytest.approx(0.015)
    assert adapted_to_entropy(0.01, 0.3, target=0.2) == pytest.approx(0.005)
    assert adapted_to_entropy(0.001, 0.3, target=0.2) == 0
    with pytest.raises(ValueError, match=r"target is -1; it must be finite and at least 0"):
        adapted_to_entropy(0.01, 0.3, target=-1)
