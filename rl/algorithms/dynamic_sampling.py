"""Dynamic sampling: prompts are sampled until enough groups have a learning signal.

DAPO, section 3.2 of https://arxiv.org/abs/2503.14476. A group whose rewards are all equal has no gradient, and the
better the policy becomes, the more groups are of this kind.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rl.algorithms.shaping import groups_with_signal
from rl.checks import check_at_least
from rl.types import Group


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
