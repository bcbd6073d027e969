import pytest

from benchmarks.checkpoint_cost import costs


def test_a_save_costs_what_the_steps_after_it_take_longer() -> None:
    # Saves follow the first and the fifth row; a step takes 10 s, of which the row says 9.9.
    seconds = [11.5, 10.5, 10.0, 10.0, 12.0, 10.0, 10.0, 10.0]
    moments = [100.0]
    for second in seconds:
        moments.append(moments[-1] + second)
    rows = [{"time": moment, "seconds_step": 9.9} for moment in moments]
    blocking, step_s, extra = costs(rows)
    assert blocking == pytest.approx([1.6, 2.1])
    assert step_s == pytest.approx(10.0)
    assert extra == pytest.approx([2.0, 2.0])
