"""Advantages of recent papers against their formulas, by hand or in plain Python."""

import numpy as np
import pytest

from ownloop_shelf.published_advantages import (
    ADVANTAGES,
    RoleBaselines,
    batch_normalized,
    decoupled,
    gpg,
    max_rl,
    optimal_baseline,
    pass_at_k,
    remax,
)
from rl.advantages import all_advantages

GROUP = np.array([1.0, 0.0, 0.0, 0.0])


def test_recipes_find_them_by_name() -> None:
    assert ADVANTAGES.items() <= all_advantages().items()


def test_pass_at_k_is_a_groups_loss_without_a_rollout() -> None:
    rewards = np.array([0.2, 0.9, 0.5, 0.9, 0.1])
    for group in (rewards, rewards[:3], GROUP, rewards[:1]):
        others = [max(np.delete(group, i), default=group[i]) for i in range(len(group))]
        assert pass_at_k(group) == pytest.approx(np.maximum(group - others, 0))


def test_max_rl_divides_by_the_mean() -> None:
    assert max_rl(GROUP).tolist() == [3, -1, -1, -1]
    assert not max_rl(np.zeros(3)).any()
    assert not max_rl(np.ones(3)).any()
    assert max_rl(np.array([sum([0.05] * 20), 0.0])) == pytest.approx([1, -1])  # a sum of 1.0000000000000002
    with pytest.raises(ValueError, match=r"a reward of -0.5; rewards must be in \[0, 1\]"):
        max_rl(np.array([0.0, -0.5]))


def test_optimal_baseline_weighs_rewards_by_length() -> None:
    lengths = np.array([10, 20, 30, 40])
    assert optimal_baseline(GROUP, lengths) == pytest.approx(GROUP - 0.1)
    assert not optimal_baseline(np.ones(4), lengths).any()
    assert not optimal_baseline(GROUP, np.zeros(4, dtype=np.int64)).any()


def test_remax_compares_with_the_greedy_answer() -> None:
    assert remax(GROUP, 0.25).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    first, second = gpg([GROUP, np.ones(4)])
    assert first.tolist() == [1.5, -0.5, -0.5, -0.5]  # twice reward - mean: one of two groups is informative
    assert not second.any()
    assert not gpg([np.ones(2)])[0].any()


def test_batch_normalized_keeps_the_sizes_of_differences() -> None:
    groups = [GROUP, np.array([0.0, 0.1])]
    expected = np.concatenate([group - group.mean() for group in groups])
    expected = (expected - expected.mean()) / expected.std()
    assert np.concatenate(batch_normalized(groups)) == pytest.approx(expected)


def test_decoupled_tells_apart_what_has_the_same_sum() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 2, (6, 2)).astype(float) for _ in range(3)]
    sums = []
    for group in groups:
        columns = [(c - c.mean()) / c.std() for c in group.T]
        sums.append(columns[0] + 0.5 * columns[1])
    flat = np.concatenate(sums)
    assert np.concatenate(decoupled(groups, [1.0, 0.5])) == pytest.approx((flat - flat.mean()) / flat.std())
    with pytest.raises(ValueError, match=r"shape \(6, 2\); it must be \[G, 3\]"):
        decoupled(groups, [1, 1, 1])


def test_each_role_has_a_baseline_of_its_own() -> None:
    baselines = RoleBaselines(decay=0.5)
    assert [baselines.advantage("first", 1.0), baselines.advantage("first", 1.0)] == [0.5, 0.25]
    assert baselines.advantage("second", -1.0) == -0.5
    assert baselines.means == {"first": 0.75, "second": -0.5}
    with pytest.raises(ValueError, match=r"decay is 1; it must be in \[0, 1\)"):
        RoleBaselines(decay=1)


def test_rounding_makes_no_rollout_the_best() -> None:
    assert not pass_at_k(np.array([0.0, 0.3, 0.1 + 0.2])).any()


def test_a_reward_that_is_not_finite_stays_in_no_baseline() -> None:
    baselines = RoleBaselines()
    for refused in (
        lambda: baselines.advantage("first", float("nan")),
        lambda: remax(np.array([1.0, 0.0]), float("nan")),
        lambda: remax(np.array([1.0, float("inf")]), 0.0),
    ):
        with pytest.raises(ValueError, match=r"rewards\[.\] is (nan|inf); rewards and advantages must be finite"):
            refused()
    assert baselines.advantage("first", 1.0) == pytest.approx(0.95)
