from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl.advantages import ADVANTAGES, all_advantages, get_advantage, group_mean, group_mean_std, leave_one_out

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=12)
FOUR = np.array([1.0, 0.0, 0.5, 0.0])


def test_group_mean_is_the_reward_above_average() -> None:
    assert group_mean(FOUR).tolist() == [0.625, -0.375, 0.125, -0.375]


def test_group_mean_std_is_standardised() -> None:
    advantages = group_mean_std(FOUR)
    assert advantages.mean() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert advantages[0] == pytest.approx(0.625 / 0.41457809879)


def test_leave_one_out_compares_with_the_others() -> None:
    others = [np.mean(np.delete(FOUR, i)) for i in range(4)]
    assert leave_one_out(FOUR) == pytest.approx(FOUR - others)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(st.floats(-1e30, 1e30), st.integers(2, 16))
@settings(deadline=None)
def test_equal_rewards_carry_no_signal(name: str, reward: float, size: int) -> None:
    # Equal rewards have a mean and a deviation that differ from them, and from 0, by rounding.
    assert not ADVANTAGES[name](np.full(size, reward)).any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(REWARDS, st.randoms(use_true_random=False))
@example([0.0, 5e-324], Random(0))
@settings(deadline=None)
def test_advantages_go_with_their_rollouts_and_add_up_to_nothing(
    name: str, rewards: list[float], random: Random
) -> None:
    advantages = ADVANTAGES[name](np.array(rewards))
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) <= 1e-9 * max(np.abs(advantages).max(), 1e-300)
    order = random.sample(range(len(rewards)), len(rewards))
    shuffled = ADVANTAGES[name](np.array(rewards)[order])
    assert shuffled == pytest.approx(advantages[order], rel=1e-6, abs=1e-9 * max(np.abs(advantages).max(), 1e-300))


@given(REWARDS, st.floats(1e-3, 1e3), st.floats(-100, 100))
@settings(deadline=None)
def test_standardised_advantages_ignore_scale_and_offset(rewards: list[float], scale: float, offset: float) -> None:
    moved = np.array(rewards) * scale + offset
    if np.ptp(rewards) * scale > 1e-3 * max(abs(offset), 1) and np.ptp(rewards) > 1e-3 * np.abs(rewards).max():
        assert group_mean_std(moved) == pytest.approx(group_mean_std(np.array(rewards)), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_huge_and_tiny_rewards_are_ordered_like_any_other(name: str) -> None:
    for scale in (1e30, 1e-30):
        advantages = ADVANTAGES[name](np.array([1.0, -1.0, 0.0]) * scale)
        assert np.isfinite(advantages).all()
        assert advantages[0] > advantages[2] > advantages[1]


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert group_mean(np.ones(1)).tolist() == group_mean_std(np.ones(1)).tolist() == [0]
    with pytest.raises(ValueError, match=r"given 1 reward.*at least 2"):
        leave_one_out(np.ones(1))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_that_lost_all_its_rollouts_has_no_advantages(name: str) -> None:
    assert ADVANTAGES[name](np.zeros(0)).tolist() == []


@pytest.mark.parametrize("name", all_advantages())
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused(name: str, wrong: float) -> None:
    more = {"lengths": np.array([1, 2, 3])} if name == "optimal_baseline" else {}
    with pytest.raises(ValueError, match=rf"rewards\[1\] is {wrong}; |given a reward of {wrong}; "):
        all_advantages()[name](np.array([1.0, wrong, 0.0]), **more)


@pytest.mark.stranger("2.F7")
def test_an_advantage_may_be_a_function_of_the_users() -> None:
    assert get_advantage("rl.advantages:leave_one_out") is leave_one_out
    assert get_advantage("group_mean") is group_mean
