from dataclasses import replace

import numpy as np
import pytest

from rl.advantages import kl_estimates, kl_from_generator, token_rewards
from rl.algorithms.actor_critic import PPOParams, ppo_advantages
from rl.algorithms.metrics import (
    PhaseClock,
    logprob_mismatch,
    merge_outputs,
    num_completion_tokens,
    rollout_metrics,
)
from rl.algorithms.preferences import weight_pairs
from rl.rollouts.episodes import rollout_to_datum
from rl.types import Datum, ForwardBackwardOutput, Group
from tests.rl.fakes import completion, single_turn


def test_the_mismatch_counts_scored_tokens_only() -> None:
    arrays = {
        "target_tokens": np.array([1, 2, 3]),
        "weights": np.array([0, 1, 1], dtype=np.float32),
        "logprobs": np.array([0, -1, -2], dtype=np.float32),
    }
    batch = [Datum(tokens=np.array([0, 1, 2]), loss_inputs=arrays)]
    output = ForwardBackwardOutput(logprobs=(np.array([0, -1.5, -1.9], dtype=np.float32),), entropy=None, metrics={})
    mismatch = logprob_mismatch(batch, output)
    assert mismatch["logprob_mismatch_mean"] == pytest.approx(0.3)
    assert mismatch["logprob_mismatch_max"] == pytest.approx(0.5)
    assert mismatch["ratio_mean"] == pytest.approx((np.exp(-0.5) + np.exp(0.1)) / 2)


@pytest.mark.stranger("B2")
def test_a_reported_position_changes_no_metric_and_no_advantage() -> None:
    rng = np.random.default_rng(0)
    found: list[object] = []
    scores = [-rng.exponential(size=8).astype(np.float32) for _ in range(2)]
    logprobs = [-rng.exponential(size=8).astype(np.float32) for _ in range(2)]
    weights = np.array([0.0] * 5 + [1.0] * 3, dtype=np.float32)
    for mask in (weights > 1, weights == 0):
        data = {"target_tokens": np.arange(8), "weights": weights, "reported_mask": mask}
        batch = [Datum(tokens=np.arange(8), loss_inputs={**data, "logprobs": q}) for q in logprobs]
        output = ForwardBackwardOutput(logprobs=tuple(scores), entropy=None, metrics={})
        ready, metrics = ppo_advantages(batch, [1.0, 0.0], scores, scores, PPOParams())
        inputs = [d.loss_inputs[name] for d in ready for name in ("advantages", "returns")]
        mismatch, kl = logprob_mismatch(batch, output), kl_from_generator(batch, scores)
        weighed = [d.weights[5:].tolist() for d in weight_pairs(batch, np.array([4.0, -4.0]))]
        num_tokens = [d.num_loss_tokens for d in (*batch, *weight_pairs(batch, np.array([4.0, -4.0])))]
        found.append([np.concatenate(inputs).tolist(), metrics, mismatch, kl, weighed, num_tokens])
    assert found[0] == found[1]


@pytest.mark.stranger("B1")
@pytest.mark.parametrize("difference", [-1000.0, -60.0, 0.0, 60.0, 88.7])
def test_ratios_and_estimates_are_finite_for_every_difference(difference: float) -> None:
    arrays = {"target_tokens": np.array([1]), "logprobs": np.array([-2000.0], dtype=np.float32)}
    batch = [Datum(tokens=np.array([0]), loss_inputs=arrays)]
    p = arrays["logprobs"] + np.float32(difference)
    exact = float(p[0]) + 2000
    output = ForwardBackwardOutput(logprobs=(p,), entropy=None, metrics={})
    assert logprob_mismatch(batch, output)["ratio_mean"] == pytest.approx(np.exp(exact))
    assert kl_from_generator(batch, [p]) == pytest.approx(np.exp(exact) - 1 - exact)
    far = ForwardBackwardOutput(logprobs=(p + 1500,), entropy=None, metrics={})
    assert logprob_mismatch(batch, far)["ratio_mean"] <= np.finfo(np.float32).max
    (kl,) = kl_estimates(arrays["logprobs"], p + 1500, "k3")
    assert token_rewards(1.0, np.array([kl]), 0.0).tolist() == [1.0]


def test_rollout_metrics_count_groups_with_signal() -> None:
    def group(*rewards: float) -> Group:
        rollouts = tuple(single_turn((1,), completion("abc"), reward=r) for r in rewards)
        return Group(problem_id="p", prompt="p", rollouts=rollouts)

    groups = [group(0, 1), group(1, 1)]
    metrics = rollout_metrics(groups)
    assert metrics["reward_mean"] == 0.75
    assert metrics["reward_std"] == pytest.approx(np.std([0, 1, 1, 1]))
    assert metrics["groups_with_signal"] == 1
    assert metrics["completion_tokens_mean"] == 3
    assert num_completion_tokens(groups) == 12


def test_empty_completions_and_metrics_of_environments() -> None:
    rollouts = [
        single_turn((1,), completion(""), reward=-1.0, metrics={"turns": 2.0}),
        single_turn((1,), completion("ab"), reward=3.0, metrics={"turns": 3.0, "valid": 1.0}),
    ]
    groups = [Group(problem_id="p", prompt="p", rollouts=tuple(rollouts))]
    metrics = rollout_metrics(groups)
    assert (metrics["turns"], metrics["valid"]) == (2.5, 1.0)
    assert metrics["reward_mean"] == metrics["completion_tokens_mean"] == 1.0
    assert num_completion_tokens(groups) == 2


def test_equal_rewards_are_no_signal_whatever_their_rounding() -> None:
    rollouts = tuple(single_turn((1,), completion("a"), reward=0.1) for _ in range(3))
    group = Group(problem_id="p", prompt="p", rollouts=rollouts)
    assert group.rewards.std() > 0  # by rounding
    assert rollout_metrics([group])["groups_with_signal"] == 0


def test_a_step_that_lost_all_its_rollouts_still_has_metrics() -> None:
    empty = Group(problem_id="p", prompt="p", rollouts=())
    for groups in ([], [empty]):
        assert rollout_metrics(groups) == {"groups_with_signal": 0, "env_failures": 0}
        assert num_completion_tokens(groups) == 0


def test_a_batch_without_scored_tokens_has_no_mismatch() -> None:
    datum = rollout_to_datum(single_turn((1, 2), completion(""), reward=0.0), 1.0)
    output = ForwardBackwardOutput(logprobs=(np.zeros(2, dtype=np.float32),), entropy=None, metrics={})
    assert logprob_mismatch([datum], output) == {}
    assert logprob_mismatch([], replace(output, logprobs=())) == {}


def test_phases_add_up() -> None:
    now = iter([1.0, 2.0, 4.0, 5.0, 9.0, 10.0])
    clock = PhaseClock(lambda: next(now))
    for _ in range(2):
        with clock("generate"):  # from 2 to 4, and from 5 to 9
            pass
    assert clock.seconds("generate") == 6
    assert clock.metrics() == {"seconds_generate": 6.0, "seconds_step": 9.0}


def test_merged_outputs_have_the_entropies_and_values_of_all() -> None:
    def output(*lengths: int, entropy: bool = True) -> ForwardBackwardOutput:
        arrays = tuple(np.full(length, length, dtype=np.float32) for length in lengths)
        metrics = {"loss": 1.0, "num_loss_tokens": float(sum(lengths))}
        return ForwardBackwardOutput(
            logprobs=arrays, entropy=arrays if entropy else None, values=arrays, metrics=metrics
        )

    merged = merge_outputs([output(1, 2), output(3)])
    assert merged.entropy is not None
    assert merged.values is not None
    for arrays in (merged.logprobs, merged.entropy, merged.values):
        assert [array.tolist() for array in arrays] == [[1], [2, 2], [3, 3, 3]]
    assert merged.metrics == {"loss": 2.0, "num_loss_tokens": 6.0}
    assert merge_outputs([output(1), output(2, entropy=False)]).entropy is None
