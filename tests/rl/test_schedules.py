import pytest

from rl.schedules import constant, cosine, linear, warmup, wsd


def test_linear_and_cosine_meet_at_both_ends_and_the_middle() -> None:
    for schedule in (linear(1.0, 0.0, 11), cosine(1.0, 0.0, 11)):
        assert [schedule(s) for s in (0, 5, 10, 99)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert cosine(1.0, 0.0, 11)(2) > linear(1.0, 0.0, 11)(2)


def test_warmup_climbs_to_the_schedule() -> None:
    assert [warmup(constant(4.0), 3)(s) for s in range(5)] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_wsd_holds_then_falls() -> None:
    values = [wsd(1.0, 0.0, 10, decay_fraction=0.4)(s) for s in range(10)]
    assert values == pytest.approx([1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_one_step_is_the_start() -> None:
    assert linear(2.0, 0.0, 1)(0) == 2.0
