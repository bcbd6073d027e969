"""Losses by name. A new one is a function in a file of this folder and a row in the table below."""

from collections.abc import Callable, Mapping
from typing import Any

from rl.checks import check_known
from rl.losses.base import Loss, LossInputs, custom_loss
from rl.losses.policy_gradient import cispo, dro, gspo, importance_sampling, ppo
from rl.losses.supervised import cross_entropy

__all__ = ["LOSSES", "Loss", "LossInputs", "get_loss"]

_POLICY_INPUTS = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", function=cross_entropy),
        Loss(name="importance_sampling", function=importance_sampling, required_inputs=_POLICY_INPUTS),
        Loss(name="ppo", function=ppo, required_inputs=_POLICY_INPUTS),
        Loss(name="cispo", function=cispo, required_inputs=_POLICY_INPUTS),
        Loss(name="dro", function=dro, required_inputs=_POLICY_INPUTS),
        Loss(name="gspo", function=gspo, required_inputs=_POLICY_INPUTS),
    )
}


def get_loss(loss: str | Callable[..., Any] | Loss, config: Mapping[str, Any] | None = None) -> Loss:
    """The loss of that name ("ppo"), import path ("module:function") or function, with its options set.

    Raises ValueError for a name that is not known (and names the nearest), or an option that the loss does not have or
    cannot take.
    """
    if isinstance(loss, Loss):
        found = loss
    elif isinstance(loss, str) and ":" not in loss:
        check_known("loss", loss, LOSSES)
        found = LOSSES[loss]
    else:
        found = custom_loss(loss)
    return found.with_options(config or {})
