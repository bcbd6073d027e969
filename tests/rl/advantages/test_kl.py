import numpy as np
import pytest
import torch

from rl.advantages import gather_scored, kl_estimates, kl_from_generator, scatter_scored
from rl.data.sources import text_to_datum
from rl.losses.shared import KLEstimator, kl_terms
from rl.rollouts.episodes import with_inputs

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_those_of_the_losses(estimator: KLEstimator) -> None:
    rng = np.random.default_rng(0)
    generator, other = rng.normal(-2, 1, (2, 50))
    expected = kl_terms(torch.tensor(generator), torch.tensor(other), estimator).numpy()
    np.testing.assert_allclose(kl_estimates(generator, other, estimator), expected, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_are_unbiased(estimator: KLEstimator) -> None:
    rng = np.random.default_rng(0)
    q, f = (rng.dirichlet(np.ones(6)) for _ in range(2))
    tokens = rng.choice(6, 200_000, p=q)
    estimates = kl_estimates(np.log(q)[tokens], np.log(f)[tokens], estimator)
    error = 4 * estimates.std() / np.sqrt(len(tokens))
    assert estimates.mean() == pytest.approx((q * np.log(q / f)).sum(), abs=error)


def test_only_scored_positions_count() -> None:
    datums = [text_to_datum([5, 6, 7], [8, 9], "completion"), text_to_datum([5], [8], "completion")]
    batch = with_inputs(
        datums, logprobs=[np.array([9, 9, -1, -2], dtype=np.float32), np.array([-1.5], dtype=np.float32)]
    )
    policy = [np.array([0, 0, -1.5, -2], dtype=np.float32), np.array([-1.0], dtype=np.float32)]
    assert [array.tolist() for array in gather_scored(batch, policy)] == [[-1.5, -2], [-1]]
    assert scatter_scored(batch[0], np.array([3.0, 4.0])).tolist() == [0, 0, 3, 4]
    expected = np.mean([np.exp(-0.5) + 0.5 - 1, 0, np.exp(0.5) - 0.5 - 1])
    assert kl_from_generator(batch, policy) == pytest.approx(expected)
