"""Dynamic sampling: more prompts are sampled until enough groups have a signal.

DAPO, section 3.2 of https://arxiv.org/abs/2503.14476. A group whose rewards are all equal has no gradient, and the
better the policy, the fewer groups are left to learn from.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rl.algorithms.shaping import groups_with_signal
from rl.checks import check_at_least
from rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """What dynamic sampling came up with."""

    groups: tuple[Group, ...]
    """Those with a signal, at most as many as asked for."""
    sampled: tuple[Group, ...]
    """All of them, for metrics and the recording."""


async def sample_with_signal(
    sample: Callable[[int, int], Awaitable[Sequence[Group]]], start: int, num_groups: int, max_rounds: int
) -> Refill:
    """`num_groups` groups with a signal, or those that `max_rounds` rounds gave.

    `sample(start, count)` rolls out problems start to start + count - 1 of a stream. Every round asks for as many as
    are missing; the next step's `start` is this one's plus `len(refill.sampled)`.

        async def sample(start: int, count: int) -> list[Group]:
            problems = env.train_problems(config.seed, start, count)
            return await rollout_groups(generator, renderer, problems, sampling, config.group_size)

        refill = await sample_with_signal(sample, start, config.prompts_per_step, max_rounds=4)
        start += len(refill.sampled)

    Raises ValueError for a number below 1.
    """
    check_at_least(1, num_groups=num_groups, max_rounds=max_rounds)
    groups: list[Group] = []
    sampled: list[Group] = []
    for _ in range(max_rounds):
        new = await sample(start + len(sampled), num_groups - len(groups))
        sampled += new
        groups += groups_with_signal(new)
        if len(groups) >= num_groups:
            break
    return Refill(groups=tuple(groups), sampled=tuple(sampled))
