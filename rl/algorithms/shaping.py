"""Reward shaping (penalties on length), filters that leave out rollouts or groups, and dynamic sampling.

Shaping and filters act between the environment's reward and the advantage. Evaluations always report the environment's
reward. Dynamic sampling samples prompts until enough groups have a learning signal: DAPO, section 3.2 of
https://arxiv.org/abs/2503.14476. A group whose rewards are all equal has no gradient, and the better the policy
becomes, the more groups are of this kind.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rl.advantages import has_signal
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


def not_truncated(rollout: Rollout) -> bool:
    """A `keep` function of `group_to_data` for overlong filtering, DAPO section 3.4.

    A truncated rollout is not trained on, but its reward still counts in the advantages of its group.
    """
    return not rollout.truncated


def groups_with_signal(groups: Sequence[Group]) -> list[Group]:
    """The groups whose rewards are not all equal, which DAPO's dynamic sampling keeps (section 3.2)."""
    return [group for group in groups if has_signal(group.rewards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroups:
    """The result of dynamic sampling."""

    with_signal: tuple[Group, ...]
    """Groups to train on: their rewards are not all equal. At most as many as were asked for."""
    all: tuple[Group, ...]
    """Every sampled group, for the metrics and for the recording."""


async def sample_with_signal(
    sample: Callable[[int, int], Awaitable[Sequence[Group]]], start: int, num_groups: int, max_rounds: int
) -> SampledGroups:
    """Samples until `num_groups` groups have a signal, for at most `max_rounds` rounds.

    `sample(start, count)` rolls out problems start to start + count - 1 of a stream, with the rewards of the
    environment: the filter, eq. 11 of the paper, is about right and wrong, and a penalty such as
    `soft_overlong_punishment` would pass for a signal. Shape the groups that are kept. Every round asks for as many
    groups as are still missing. The next step's `start` is this step's plus `len(sampled.all)`.

        async def sample(start: int, count: int) -> list[Group]:
            problems = env.train_problems(config.seed, start, count)
            return await rollout_groups(generator, renderer, problems, sampling, config.group_size)

        sampled = await sample_with_signal(sample, start, config.prompts_per_step, max_rounds=4)
        start += len(sampled.all)

    Raises ValueError if `num_groups` or `max_rounds` is below 1.
    """
    check_at_least(1, num_groups=num_groups, max_rounds=max_rounds)
    with_signal: list[Group] = []
    sampled: list[Group] = []
    for _ in range(max_rounds):
        new = await sample(start + len(sampled), num_groups - len(with_signal))
        sampled += new
        with_signal += groups_with_signal(new)
        if len(with_signal) >= num_groups:
            break
    return SampledGroups(with_signal=tuple(with_signal), all=tuple(sampled))
