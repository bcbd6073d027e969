"""Between the environment's reward and the advantage: penalties on length, and rollouts or groups left out.

A penalty is a function of a rollout; `shape_rewards` adds it. Nothing here changes what an evaluation reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl.advantages.group_relative import has_signal
from rl.checks import check_at_least
from rl.types import Group, Rollout

Penalty = Callable[[Rollout], float]
"""What is added to a rollout's reward; negative to punish."""


def shape_rewards(group: Group, penalty: Penalty) -> Group:
    """The group with the penalty added to each reward. The metric `unshaped_reward` keeps the environment's."""

    def shaped(rollout: Rollout) -> Rollout:
        metrics = {"unshaped_reward": rollout.reward, **rollout.metrics}
        return replace(rollout, reward=rollout.reward + penalty(rollout), metrics=metrics)

    return replace(group, rollouts=tuple(map(shaped, group.rollouts)))


def soft_overlong_punishment(max_tokens: int, cache: int) -> Penalty:
    """0 up to max_tokens - cache tokens, from there in a straight line to -1 at max_tokens, and -1 beyond.

    DAPO, eq. 13 of https://arxiv.org/abs/2503.14476. Raises ValueError unless 1 <= cache <= max_tokens.
    """
    check_at_least(1, cache=cache)
    if cache > max_tokens:
        raise ValueError(f"cache is {cache}; it must not exceed max_tokens {max_tokens}")

    def penalty(rollout: Rollout) -> float:
        into_cache = rollout.num_sampled_tokens - (max_tokens - cache)
        return -min(max(into_cache / cache, 0.0), 1.0)

    return penalty


def length_penalty(per_token: float) -> Penalty:
    """-per_token for every sampled token. Raises ValueError for a negative one."""
    check_at_least(0, per_token=per_token)
    return lambda rollout: -per_token * rollout.num_sampled_tokens


def not_truncated(rollout: Rollout) -> bool:
    """`keep` of `group_to_data` for overlong filtering, DAPO section 3.4: a rollout that a token limit cut off
    counts in its group's baseline and is not learned from."""
    return not rollout.truncated


def groups_with_signal(groups: Sequence[Group]) -> list[Group]:
    """Those whose rewards are not all equal: what DAPO's dynamic sampling keeps, section 3.2."""
    return [group for group in groups if has_signal(group.rewards)]
