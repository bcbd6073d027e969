"""Schedules: plain functions of the step, called by the controller. Steps count from 0."""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return lambda _step: value


def linear(start: float, end: float, num_steps: int) -> Schedule:
    """`start` at step 0, `end` from step num_steps - 1 on, a straight line between."""

    def value(step: int) -> float:
        done = min(step / max(num_steps - 1, 1), 1.0)
        return start + (end - start) * done

    return value


def cosine(start: float, end: float, num_steps: int) -> Schedule:
    """`start` at step 0, `end` from step num_steps - 1 on, half a cosine between (https://arxiv.org/abs/1608.03983)."""

    def value(step: int) -> float:
        done = min(step / max(num_steps - 1, 1), 1.0)
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))

    return value


def wsd(peak: float, end: float, num_steps: int, decay_fraction: float = 0.2) -> Schedule:
    """`peak`, then a straight line to `end` over the last fraction of the steps.

    With `warmup` around it, the warmup-stable-decay schedule of MiniCPM, https://arxiv.org/abs/2404.06395.
    """
    decay_steps = max(round(num_steps * decay_fraction), 1)
    decay = linear(peak, end, decay_steps + 1)
    return lambda step: decay(max(step - (num_steps - 1 - decay_steps), 0))


def warmup(schedule: Schedule, num_steps: int) -> Schedule:
    """Scales the first `num_steps` steps of a schedule by 1/(num_steps + 1), 2/(num_steps + 1), ..."""
    return lambda step: schedule(step) * min((step + 1) / (num_steps + 1), 1.0)
