"""Reward shaping (penalties on length) and filters that leave out rollouts or groups.

They act between the environment's reward and the advantage. Evaluations always report the environment's reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl.advantages.group_relative import has_signal
from rl.checks import check_at_least
from rl.types import Group, Rollout

Penalty = Callable[[Rollout], float]
"""A function of a rollout whose value is added to its reward; negative to punish."""
_UNSHAPED = "unshaped_reward"


def shape_rewards(group: Group, penalty: Penalty) -> Group:
    """Adds the penalty to each reward of the group. The metric `unshaped_reward` keeps the environment's reward."""

    def shaped(rollout: Rollout) -> Rollout:
        metrics = {_UNSHAPED: rollout.reward, **rollout.metrics}
        return replace(rollout, reward=rollout.reward + penalty(rollout), metrics=metrics)

    return replace(group, rollouts=tuple(map(shaped, group.rollouts)))


def unshaped(group: Group) -> Group:
    """The group before `shape_rewards`, however often it was applied."""

    def original(rollout: Rollout) -> Rollout:
        metrics = dict(rollout.metrics)
        return replace(rollout, reward=metrics.pop(_UNSHAPED, rollout.reward), metrics=metrics)

    return replace(group, rollouts=tuple(map(original, group.rollouts)))


def soft_overlong_punishment(max_tokens: int, cache: int) -> Penalty:
    """0 up to max_tokens - cache tokens of the longest turn, then linear down to -1 at max_tokens, and -1 beyond.

    `max_tokens` limits every turn, so a rollout of many short turns is not punished. DAPO, eq. 13 of
    https://arxiv.org/abs/2503.14476. Raises ValueError unless 1 <= cache <= max_tokens.
    """
    check_at_least(1, cache=cache)
    if cache > max_tokens:
        raise ValueError(f"cache is {cache}; it must not exceed max_tokens {max_tokens}")

    def penalty(rollout: Rollout) -> float:
        longest = max((len(turn.completion.tokens) for turn in rollout.turns), default=0)
        into_cache = longest - (max_tokens - cache)
        return -min(max(into_cache / cache, 0.0), 1.0)

    return penalty


def length_penalty(per_token: float) -> Penalty:
    """-per_token for every sampled token. Raises ValueError if `per_token` is negative."""
    check_at_least(0, per_token=per_token)
    return lambda rollout: -per_token * rollout.num_sampled_tokens


def not_truncated(rollout: Rollout) -> bool:
    """A `keep` function of `group_to_data` for overlong filtering, DAPO section 3.4.

    A truncated rollout is not trained on, but its reward still counts in the advantages of its group.
    """
    return not rollout.truncated


def groups_with_signal(groups: Sequence[Group]) -> list[Group]:
    """The groups whose rewards are not all equal, which DAPO's dynamic sampling keeps (section 3.2)."""
    return [group for group in groups if has_signal(group.rewards)]
