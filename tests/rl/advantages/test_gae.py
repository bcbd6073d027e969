import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.advantages import Array, explained_variance, gae, group_mean, normalize, reinforce_plus_plus, token_rewards

FINITE = st.floats(-10, 10)
STEPS = st.lists(st.tuples(FINITE, FINITE), max_size=8)


def _definition(rewards: Array, values: Array, gamma: float, lam: float, last_value: float) -> list[float]:
    """The infinite sum of eq. 16, term by term, up to the end of the episode."""
    following = [*values[1:], last_value]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=False)]
    return [sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_advantages_and_returns_by_hand() -> None:
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.75]), gamma=0.5, gae_lambda=0.5)
    # deltas: 0.125 - 0.5 = -0.375; 0.375 - 0.25 = 0.125; 1 - 0.75 = 0.25. Each adds a quarter of the next advantage.
    assert advantages.tolist() == [-0.375 + (0.125 + 0.25 / 4) / 4, 0.125 + 0.25 / 4, 0.25]
    assert returns.tolist() == (advantages + np.array([0.5, 0.25, 0.75])).tolist()


def test_a_truncated_episode_ends_with_the_critics_value() -> None:
    rewards, values = np.array([0.0, 1.0]), np.array([0.2, 0.4])
    ended, _ = gae(rewards, values, gamma=0.9)
    cut, _ = gae(rewards, values, gamma=0.9, last_value=2.0)
    assert (cut - ended).tolist() == pytest.approx([0.9 * 2 * (0.9 * 0.95), 0.9 * 2])


@given(STEPS, st.floats(0, 1), st.floats(0, 1), FINITE)
@settings(deadline=None)
def test_advantages_are_the_papers_sum(
    steps: list[tuple[float, float]], gamma: float, lam: float, last_value: float
) -> None:
    rewards, values = np.array([r for r, _ in steps]), np.array([v for _, v in steps])
    advantages, returns = gae(rewards, values, gamma=gamma, gae_lambda=lam, last_value=last_value)
    assert advantages.tolist() == pytest.approx(_definition(rewards, values, gamma, lam, last_value))
    assert returns.tolist() == pytest.approx((advantages + values).tolist())


@given(STEPS)
@settings(deadline=None)
def test_lambda_1_is_monte_carlo_and_lambda_0_one_step(steps: list[tuple[float, float]]) -> None:
    rewards, values = np.array([r for r, _ in steps]), np.array([v for _, v in steps])
    monte_carlo = gae(rewards, values, gae_lambda=1.0)[1]
    assert monte_carlo.tolist() == pytest.approx(np.cumsum(rewards[::-1])[::-1].tolist(), abs=1e-9)
    one_step = gae(rewards, values, gae_lambda=0.0)[1]
    assert one_step.tolist() == pytest.approx((rewards + np.append(values[1:], 0)[: len(values)]).tolist(), abs=1e-9)


def test_the_reward_comes_last_and_every_token_pays_its_kl() -> None:
    assert token_rewards(2.0, np.array([0.5, -1.0, 0.25]), kl_coef=0.1).tolist() == [-0.05, 0.1, 1.975]
    assert token_rewards(2.0, np.zeros(0), kl_coef=0.1).tolist() == []


def test_reinforce_plus_plus_by_hand() -> None:
    kl = [np.array([1.0, 2.0]), np.array([0.0]), np.zeros(0)]
    got = reinforce_plus_plus([1.0, 0.0, 5.0], kl, kl_coef=0.1)
    raw = np.array([1 - 0.1 * 3, 1 - 0.1 * 2, 0.0])
    expected = (raw - raw.mean()) / raw.std()
    assert got[0].tolist() == pytest.approx(expected[:2].tolist())
    assert got[1].tolist() == pytest.approx(expected[2:].tolist())
    assert got[2].tolist() == []


def test_reinforce_plus_plus_centres_groups_and_scales_all() -> None:
    groups = [np.array([1.0, 0.0]), np.array([10.0, 4.0])]
    centred = np.concatenate([group_mean(group) for group in groups])
    got = reinforce_plus_plus(centred, [np.zeros(3)] * 4)
    assert [array[0] for array in got] == pytest.approx([v / np.std([0.5, -0.5, 3, -3]) for v in (0.5, -0.5, 3, -3)])


@given(st.lists(st.lists(FINITE, max_size=4), max_size=5))
@settings(deadline=None)
def test_normalized_advantages_are_standard_whatever_the_cut(rows: list[list[float]]) -> None:
    got = normalize([np.array(row) for row in rows])
    assert [len(array) for array in got] == [len(row) for row in rows]
    flat = np.concatenate([*got, np.zeros(0)])
    assert np.isfinite(flat).all()
    if flat.any():
        assert flat.mean() == pytest.approx(0, abs=1e-6)
        assert flat.std() == pytest.approx(1)


def test_explained_variance() -> None:
    returns = [np.array([1.0, 2.0]), np.array([3.0])]
    assert explained_variance(returns, returns) == 1
    assert explained_variance([np.array([2.0, 2.0]), np.array([2.0])], returns) == 0
    assert explained_variance([np.array([3.0, 2.0]), np.array([1.0])], returns) == -3
    assert np.isnan(explained_variance(returns, [np.ones(2), np.ones(1)]))


@pytest.mark.parametrize(
    ("rewards", "values", "factors", "message"),
    [
        ([1.0, 2.0], [1.0], {}, r"rewards has shape \(2,\) and values \(1,\)"),
        ([[1.0]], [[1.0]], {}, "one dimension"),
        ([1.0], [1.0], {"gamma": 1.1}, r"gamma is 1.1; it must be in \[0, 1\]"),
        ([1.0], [1.0], {"gae_lambda": float("nan")}, "gae_lambda is nan"),
    ],
)
def test_mistakes_are_named(rewards: list[float], values: list[float], factors: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gae(np.array(rewards), np.array(values), **factors)
