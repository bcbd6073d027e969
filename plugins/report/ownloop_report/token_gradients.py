"""What each token of a step does to the gradient: its share of it, and whether the loss clips it.

The derivative of the loss by a token's log-prob is computed again from what the step computed, without the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.losses import Loss, LossInputs, get_loss, option_defaults, sequences_alike
from rl.types import Datum

Floats = NDArray[np.float32]
_OPEN = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e30, "dual_clip_threshold": 0.0}


def token_gradients(
    batch: Sequence[Datum], logprobs: Sequence[Floats], config: Mapping[str, Any]
) -> list[tuple[Floats, NDArray[np.bool_]]] | None:
    """Of each datum [T] the shares, and whether the loss clips the token; None where the loss is not known to do so.

    A share is -dL/dp of a token's log-prob p over the sum of all |dL/dp| of the step: above 0, the step makes the token
    more probable. A token is clipped if its derivative is another one without the loss's clip thresholds. `config` is
    that of the run, in JSON types. None stands for losses of the user's own, for those that need the entropy or draw
    tokens from the whole batch, and for loops without a loss of tokens.
    """
    name = config.get("loss")
    if not isinstance(name, str) or ":" in name:
        return None
    loss = get_loss(name, config.get("loss_config"))
    given = batch[0].loss_inputs if batch else {}
    if loss.needs_entropy or loss.prepare is not None or not {*loss.required_inputs} <= {*given}:
        return None
    kind = config.get("normaliser", "paper")
    if (loss.normaliser if kind == "paper" else kind) == "sequences":
        batch = sequences_alike(batch, 1.0)
    batch = loss.prepared(batch)
    own = _derivatives(loss, batch, logprobs)
    total = max(float(sum(np.abs(each).sum() for each in own)), 1e-30)
    known = {option: value for option, value in _OPEN.items() if option in option_defaults(loss.function)}
    unclipped = _derivatives(loss.with_options(known), batch, logprobs) if known else own
    return [(-mine / total, ~np.isclose(mine, free, rtol=1e-5)) for mine, free in zip(own, unclipped, strict=True)]


def _derivatives(loss: Loss, batch: Sequence[Datum], logprobs: Sequence[Floats]) -> list[Floats]:
    """[T] of each datum: the derivative of the loss by the log-prob, 0 where nothing is scored."""
    import torch

    scored = [datum.scored for datum in batch]
    columns = {name: [datum.loss_inputs[name] for datum in batch] for name in batch[0].loss_inputs}
    columns["weights"] = [datum.weights for datum in batch]

    def joined(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([each[where] for each, where in zip(arrays, scored, strict=True)]))

    p = joined(logprobs).float().requires_grad_()
    index = np.repeat(np.arange(len(batch)), [int(where.sum()) for where in scored])
    arrays = {name: joined(arrays) for name, arrays in columns.items()}
    inputs = LossInputs(arrays=arrays, datum_index=torch.from_numpy(index), num_datums=len(batch))
    loss(p, None, inputs)[0].backward()
    flat = np.zeros(0, np.float32) if p.grad is None else p.grad.numpy()
    found = [np.zeros(len(where), np.float32) for where in scored]
    ends = np.cumsum([int(where.sum()) for where in scored])[:-1]
    for array, where, values in zip(found, scored, np.split(flat, ends), strict=True):
        array[where] = values
    return found
