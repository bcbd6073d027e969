import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from rl.algorithms.actor_critic import PPOParams, merge_minibatches, minibatches, ppo_advantages, scored
from rl.data.sources import text_to_datum
from rl.losses.shared import KLEstimator
from rl.rollouts.episodes import with_inputs
from rl.types import Datum, ForwardBackwardOutput
from tests.trainer.engine_trainer import EngineTrainer

Q = [[-1.0, -0.5, -2.0], [-0.1, -3.0]]
F = [[-1.5, -0.25, -2.0], [-0.4, -2.0]]
V = [[0.2, 0.4, 0.9], [0.1, -0.3]]
REWARDS = [1.0, 0.0]


def _padded(values: list[list[float]]) -> list[np.ndarray]:
    """Puts an unscored position of the prompt in front."""
    return [np.array([0, *of_datum], dtype=np.float32) for of_datum in values]


def _batch() -> list[Datum]:
    datums = [text_to_datum([5, 6], [7] * len(q), "completion") for q in Q]
    return with_inputs(datums, logprobs=_padded(Q))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8)])
def test_advantages_are_the_papers_sums(estimator: KLEstimator, gamma: float, gae_lambda: float) -> None:
    """Against the definitions, written out: r_t, delta_t, the sum of eq. 16 of 1506.02438, then normalised."""
    params = PPOParams(kl_coef=0.1, kl_estimator=estimator, gamma=gamma, gae_lambda=gae_lambda)
    batch, metrics = ppo_advantages(_batch(), REWARDS, _padded(V), _padded(F), params)
    advantages: list[list[float]] = []
    rewards_to_go: list[float] = []
    for q, f, v, reward in zip(Q, F, V, REWARDS, strict=True):
        log_ratios = [a - b for a, b in zip(q, f, strict=True)]
        kl = log_ratios if estimator == "k1" else [np.exp(-x) + x - 1 for x in log_ratios]
        r = [-0.1 * k + (reward if t == len(q) - 1 else 0) for t, k in enumerate(kl)]
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0) - v[t] for t in range(len(v))]
        advantages.append(
            [sum((gamma * gae_lambda) ** (s - t) * delta[s] for s in range(t, len(v))) for t in range(len(v))]
        )
        rewards_to_go += [sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))]
    flat = np.concatenate(advantages)
    for datum, of_datum, v in zip(batch, advantages, V, strict=True):
        inputs = datum.loss_inputs
        normalised = (np.array(of_datum) - flat.mean()) / flat.std()
        np.testing.assert_allclose(inputs["advantages"], [0, *normalised], rtol=1e-5)
        np.testing.assert_allclose(inputs["returns"], [0, *(np.array(of_datum) + v)], rtol=1e-5)
        np.testing.assert_allclose(inputs["old_values"], [0, *v], rtol=1e-6)
    values = np.concatenate([np.array(v) for v in V])
    expected = 1 - np.var(np.array(rewards_to_go) - values) / np.var(rewards_to_go)
    assert metrics["explained_variance"] == pytest.approx(expected, rel=1e-5)
    assert metrics["kl_reference"] > 0


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_scores_come_from_whom_they_should(cap: float) -> None:
    calls: list[str] = []
    policy, critic, reference = (_Scorer(name, calls) for name in ("policy", "critic", "reference"))
    batch, values, frozen = asyncio.run(scored(_batch(), policy, critic, reference, {"importance_cap": cap}))
    assert sorted(calls) == (["critic", "policy", "reference"] if cap else ["critic", "reference"])
    assert values is not None
    for datum, value, log_prob in zip(batch, values, frozen, strict=True):
        assert (value == len("critic")).all()
        assert (log_prob == -len("reference")).all()
        assert ("old_logprobs" in datum.loss_inputs) == bool(cap)
        assert not cap or (datum.loss_inputs["old_logprobs"] == -len("policy")).all()


class _Scorer(EngineTrainer):
    """Gives every position the length of its name as value, and minus that as log-prob."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        self._calls.append(self._name)
        scores = tuple(np.full(len(datum.tokens), len(self._name), dtype=np.float32) for datum in batch)
        return ForwardBackwardOutput(logprobs=tuple(-s for s in scores), values=scores, entropy=None, metrics={})


def test_every_epoch_takes_every_datum_once_in_its_own_order() -> None:
    prompts, answers = range(1, 11), range(50, 53)
    batch = [text_to_datum([5, prompt], [answer], "completion") for prompt in prompts for answer in answers]
    params = PPOParams(num_epochs=3, minibatches_per_epoch=4)

    def pairs(part: list[Datum]) -> list[tuple[int, int]]:
        return [(int(datum.tokens[1]), int(datum.loss_inputs["target_tokens"][1])) for datum in part]

    parts = [pairs(part) for part in minibatches(batch, params, (0, 1))]
    assert [len(part) for part in parts] == [9, 9, 6, 6] * 3
    for part in parts:  # the answers to a prompt stay together
        assert part == [(prompt, answer) for prompt, _ in part[::3] for answer in answers]
    epochs = [[pair for part in parts[i : i + 4] for pair in part] for i in (0, 4, 8)]
    assert all(Counter(epoch) == Counter(product(prompts, answers)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert parts == [pairs(part) for part in minibatches(batch, params, (0, 1))]
    assert parts != [pairs(part) for part in minibatches(batch, params, (0, 2))]
    assert len(minibatches(batch[:6], params, (0, 1))) == 2 * 3  # never an empty one


def test_minibatches_are_merged_in_order_and_losses_per_token() -> None:
    first, second = _batch()

    def output(datum: Datum, loss: float, mismatch: float) -> ForwardBackwardOutput:
        metrics = {"loss": loss, "num_loss_tokens": float(datum.num_loss_tokens)}
        logprobs = (datum.loss_inputs["logprobs"] + np.float32(mismatch),)
        return ForwardBackwardOutput(logprobs=logprobs, entropy=None, metrics=metrics)

    outputs = [
        (output(second, 6.0, 0.5), output(second, 3.0, 0.0)),
        (output(first, 4.0, 2.0), output(first, 2.0, 0.0)),
    ]
    batch, merged, metrics = merge_minibatches([[second], [first]], outputs)
    assert [datum is other for datum, other in zip(batch, [second, first], strict=True)] == [True, True]
    assert [len(array) for array in merged.logprobs] == [len(datum.tokens) for datum in batch]
    assert metrics["loss"] == pytest.approx(10 / 5)
    assert metrics["critic_loss"] == pytest.approx(5 / 5)
    assert metrics["logprob_mismatch_max"] == pytest.approx(0.5)  # of the first minibatch alone
