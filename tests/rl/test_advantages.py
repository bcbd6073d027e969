import numpy as np
import pytest

from rl.advantages import ADVANTAGES, group_mean, group_mean_std, leave_one_out

REWARDS = np.array([1.0, 0.0, 0.5, 0.0])


def test_group_mean_is_the_reward_above_average() -> None:
    assert group_mean(REWARDS).tolist() == [0.625, -0.375, 0.125, -0.375]


def test_group_mean_std_is_standardised() -> None:
    advantages = group_mean_std(REWARDS)
    assert advantages.mean() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert advantages[0] == pytest.approx(0.625 / 0.41457809879)


def test_leave_one_out_compares_with_the_others() -> None:
    others = [np.mean(np.delete(REWARDS, i)) for i in range(4)]
    assert leave_one_out(REWARDS) == pytest.approx(REWARDS - others)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_carry_no_signal(name: str) -> None:
    assert not ADVANTAGES[name](np.full(5, 0.3)).any()
