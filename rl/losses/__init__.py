"""Losses by name. To add one, write a function in a file of this folder and add a row to the table below."""

from collections.abc import Callable, Mapping
from typing import Any

from rl.checks import check_known
from rl.losses.base import Loss, custom_loss
from rl.losses.critic import value
from rl.losses.cross_entropy import cross_entropy
from rl.losses.inputs import LossInputs
from rl.losses.policy_gradient import cispo, dro, gspo, importance_sampling, ppo
from rl.losses.shared import ENTROPY_OPTIONS, IMPORTANCE_OPTIONS, KL_OPTIONS

__all__ = ["LOSSES", "Loss", "LossInputs", "get_loss"]

_INPUTS = ("logprobs", "advantages")
_OPTIONS = (*KL_OPTIONS, *ENTROPY_OPTIONS, *IMPORTANCE_OPTIONS)

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", function=cross_entropy),
        Loss(name="importance_sampling", function=importance_sampling, required_inputs=_INPUTS, takes=_OPTIONS),
        Loss(name="ppo", function=ppo, required_inputs=_INPUTS, takes=_OPTIONS, clips=True),
        Loss(name="cispo", function=cispo, required_inputs=_INPUTS, takes=_OPTIONS, clips=True),
        # DRO has no importance ratio that a correction could change.
        Loss(name="dro", function=dro, required_inputs=_INPUTS, takes=(*KL_OPTIONS, *ENTROPY_OPTIONS)),
        Loss(name="gspo", function=gspo, required_inputs=_INPUTS, takes=_OPTIONS, clips=True),
        Loss(name="value", function=value, required_inputs=("old_values", "returns"), head="value"),
    )
}


def get_loss(loss: str | Callable[..., Any] | Loss, config: Mapping[str, Any] | None = None) -> Loss:
    """A loss with its options set. `loss` is a name ("ppo"), an import path ("module:function") or a function.

    Raises ValueError for an unknown name or option, naming the nearest known one, and for a bad value of an option.
    """
    if isinstance(loss, Loss):
        found = loss
    elif isinstance(loss, str) and ":" not in loss:
        check_known("loss", loss, LOSSES)
        found = LOSSES[loss]
    else:
        found = custom_loss(loss)
    return found.with_options(config or {})
