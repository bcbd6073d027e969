"""The loss of a critic, a model with a value head. Legend: S scored positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.losses.inputs import LossInputs, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def value(
    values: Tensor, entropy: Tensor | None, inputs: LossInputs, *, clip_range: float = 0.2
) -> tuple[Tensor, Metrics]:
    """sum w/2 max((V - R)^2, (clip(V, v - clip_range, v + clip_range) - R)^2), with R = `returns`, v = `old_values`.

    `values` [S] is V, the head's output. `old_values` is its output before the step, and `returns` comes from
    `rl.advantages.gae.gae`. This is PPO's clipped value loss as in OpenAI baselines' `ppo2`
    (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, detail 9): V gains nothing by
    moving more than `clip_range` towards the returns in one step. 0 switches clipping off.
    """
    del entropy
    returns, old_values = inputs["returns"], inputs["old_values"]
    error = (values - returns) ** 2
    metrics = {"squared_error": error.sum()}
    if clip_range > 0:
        clipped = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns) ** 2
        metrics["clipped_tokens"] = (clipped > error).sum()
        error = error.maximum(clipped)
    return 0.5 * (inputs.weights * error).sum(), metrics
