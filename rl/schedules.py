"""Schedules: plain functions of the step, called by the controller. Steps count from 0.

Any function `step -> float` is a schedule. The functions of this file raise ValueError, naming the argument, for a
value that is negative or not finite and for a number of steps below 1.
"""

import math
from collections.abc import Callable

from rl.checks import check_above_zero, check_at_least, check_between

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same value at every step."""
    _check_values(value=value)
    return lambda _step: value


def linear(start: float, end: float, num_steps: int) -> Schedule:
    """A straight line from `start` at step 0 to `end` at step num_steps - 1, and `end` from there on."""
    _check_values(start=start, end=end)
    check_at_least(1, num_steps=num_steps)

    def value(step: int) -> float:
        progress = min(step / max(num_steps - 1, 1), 1.0)
        return start + (end - start) * progress

    return value


def cosine(start: float, end: float, num_steps: int) -> Schedule:
    """Like `linear`, but with half a period of a cosine instead of the line (https://arxiv.org/abs/1608.03983)."""
    _check_values(start=start, end=end)
    check_at_least(1, num_steps=num_steps)

    def value(step: int) -> float:
        progress = min(step / max(num_steps - 1, 1), 1.0)
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return value


def wsd(peak: float, end: float, num_steps: int, decay_fraction: float = 0.2) -> Schedule:
    """`peak`, then a straight line to `end` over the last `decay_fraction` of the steps; 0 means no decay.

    Wrapped in `warmup`, this is the warmup-stable-decay schedule of MiniCPM, https://arxiv.org/abs/2404.06395.
    """
    _check_values(peak=peak, end=end)
    check_at_least(1, num_steps=num_steps)
    check_between(0, 1, decay_fraction=decay_fraction)
    if decay_fraction == 0:
        return constant(peak)
    decay_steps = min(max(round(num_steps * decay_fraction), 1), num_steps - 1)
    decay = linear(peak, end, decay_steps + 1)
    return lambda step: decay(max(step - (num_steps - 1 - decay_steps), 0))


def warmup(schedule: Schedule, num_steps: int) -> Schedule:
    """Scales the first `num_steps` steps of a schedule by 1/(num_steps + 1), 2/(num_steps + 1), ... May be 0."""
    check_at_least(0, num_steps=num_steps)
    return lambda step: schedule(step) * min((step + 1) / (num_steps + 1), 1.0)


def adapted_to_kl(learning_rate: float, kl: float, *, target: float, highest: float) -> float:
    """The next step's learning rate: lower after a step that moved the policy too far, higher after a small move.

    It is divided by 1.5 if `kl` is above 1.5 * target, multiplied by 1.5 if `kl` is below target / 1.5, and never above
    `highest`. This is the rule by which section 4 of PPO (https://arxiv.org/abs/1707.06347) adapts its KL penalty,
    applied to the learning rate. Raises ValueError unless `target` is above 0.
    """
    check_above_zero(target=target)
    if kl > 1.5 * target:
        learning_rate /= 1.5
    elif kl < target / 1.5:
        learning_rate *= 1.5
    return min(learning_rate, highest)


def adapted_to_entropy(coef: float, entropy: float, *, target: float, change: float = 5e-3) -> float:
    """The next step's `entropy_coef`: higher by `change` after a step below the target entropy, else lower, from 0 on.

    A policy above the target needs no bonus, so a loop passes 0 then and keeps the coefficient: Skywork-OR1's adaptive
    entropy control, section 3.2.4 of https://arxiv.org/abs/2505.22312. Both are in nats per token.
    """
    _check_values(coef=coef, entropy=entropy, target=target, change=change)
    return coef + change if entropy < target else max(coef - change, 0.0)


def _check_values(**values: float) -> None:
    """Raises ValueError naming the first value that is negative or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")
