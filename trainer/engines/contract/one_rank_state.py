"""How an engine of one rank keeps its state: calls that add up, failures, offload, checkpoints.

These checks hold for engines of adapters too, because they compare an engine with itself.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from rl.losses import LossInputs, get_loss
from trainer.engines.base import Engine
from trainer.engines.contract.comparisons import gradients, parameters, require, require_close, require_equal
from trainer.engines.contract.one_rank import (
    BATCH,
    MICROBATCHES,
    PARAMS,
    Check,
    Subject,
    explode,
    require_refused,
    step,
)


def check_accumulation(subject: Subject) -> str:
    """Calls accumulate until a step or until they are dropped; several calls are one call, to the last bit."""
    once, twice = subject.build(), subject.build()
    once.forward_backward([BATCH], get_loss("ppo"))
    twice.forward_backward([BATCH[2:]], get_loss("ppo"))
    twice.forward([BATCH])
    twice.forward_backward([BATCH[:2]], get_loss("ppo"))
    worst = require_close("gradients of two calls", gradients(twice), gradients(once), 1e-5)
    twice.zero_grad()
    require(not gradients(twice), "there is a gradient after `zero_grad`")
    twice.forward_backward([BATCH], get_loss("ppo"))
    require_close("gradients after `zero_grad`", gradients(twice), gradients(once), 1e-5)
    twice.optim_step(PARAMS)
    require(not gradients(twice), "there is a gradient after `optim_step`")
    return f"any split within {worst:.0e}"


def check_calls_of_one_row(subject: Subject) -> str:
    """Calls of one micro-batch each add up to the bits of one call of all."""
    rows = [BATCH[:3], BATCH[3:6], BATCH[6:]]
    once, apart = subject.build(), subject.build()
    once.forward_backward(rows, get_loss("ppo"))
    for row in rows:
        apart.forward_backward([row], get_loss("ppo"))
    require_equal("gradients", gradients(apart), gradients(once))
    return "equal to the last bit"


def check_nothing_scored(subject: Subject) -> str:
    """A batch of which no token is scored has a loss of 0 and a gradient of zeros, which makes a step."""
    engine = subject.build()
    silent = [
        replace(datum, loss_inputs={**datum.loss_inputs, "weights": np.zeros(len(datum.tokens), np.float32)})
        for datum in BATCH
    ]
    output = engine.forward_backward([silent[:3], [], silent[3:]], get_loss("cross_entropy"))
    told = [output.metrics.get(name) for name in ("loss", "num_loss_tokens")]
    require(told == [0.0, 0.0], f"loss and num_loss_tokens are {told}; [0.0, 0.0] is expected")
    require(not any(values.any() for values in output.logprobs), "there are log-probs of tokens that are not scored")
    zeros = {name: parameter.detach() * 0 for name, parameter in engine.hf_parameters()}
    require_equal("gradients", gradients(engine), zeros)
    result = engine.optim_step(PARAMS)
    made = (result.grad_norm, result.skipped, result.policy_version)
    require(made == (0.0, False, 1), f"the step returned grad_norm, skipped and version {made}")
    engine.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    before = gradients(engine)
    engine.forward_backward([silent], get_loss("cross_entropy"))
    require_equal("gradients after a batch of which nothing is scored", gradients(engine), before)
    return "a gradient of zeros"


def check_failure(subject: Subject) -> str:
    """A loss that raises leaves the gradient as it was."""
    engine = subject.build()
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    before = gradients(engine)
    try:
        engine.forward_backward([BATCH[:3], BATCH[:2]], get_loss(_fails_on_two))
    except ArithmeticError as error:
        require(str(error) == "my own mistake", f"the loss's error became {error!r}")
    else:
        require(False, "a loss that raises did not end the call")
    require_equal("gradients after the failure", gradients(engine), before)
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    require_close("gradients of the next call", gradients(engine), {n: 2 * grad for n, grad in before.items()}, 1e-6)
    return "gradient as it was"


def check_not_finite(subject: Subject) -> str:
    """A gradient that is not finite is dropped and changes nothing."""
    engine, untouched = subject.build(), subject.build()
    for each in (engine, untouched):
        step(each)
    engine.forward_backward([BATCH], get_loss(explode))
    result = engine.optim_step(PARAMS)
    told = (result.skipped, result.policy_version, engine.policy_version)
    require(told == (True, 1, 1), f"the step returned skipped, version and policy_version {told}")
    for each in (engine, untouched):
        step(each)
    require_equal("parameters after the next step", parameters(engine), parameters(untouched))
    return "skipped"


def check_checkpoint(subject: Subject) -> str:
    """Training goes on from a checkpoint to the last bit."""
    engine, fresh = subject.build(), subject.build()
    step(engine)
    engine.save_checkpoint(subject.scratch / "checkpoint")
    step(fresh)
    step(fresh)
    fresh.forward_backward([BATCH], get_loss("cross_entropy"))  # dropped by the load
    version = fresh.load_checkpoint(subject.scratch / "checkpoint")
    require(version == fresh.policy_version == 1, f"load_checkpoint returned version {version}; 1 is expected")
    for each in (engine, fresh):
        step(each)
    require_equal("parameters after the next step", parameters(fresh), parameters(engine))
    return "equal to the last bit"


def check_offload(subject: Subject) -> str:
    """Offloading changes no number."""
    # Without an accelerator, host and device are the same; what moves when is another question.
    moved, untouched = subject.build(), subject.build()
    for each in (moved, untouched):
        step(each)
        each.forward_backward([BATCH[:3]], get_loss("cross_entropy"))
    moved.to("cpu", model=True, gradients=True, optimizer=True)
    with moved.eval_mode():
        first = moved.forward(MICROBATCHES)
    with moved.train_mode():
        second = moved.forward(MICROBATCHES)
        moved.forward_backward([BATCH[3:]], get_loss("cross_entropy"))
        moved.optim_step(PARAMS, 0.01)
    untouched.forward_backward([BATCH[3:]], get_loss("cross_entropy"))
    untouched.optim_step(PARAMS, 0.01)
    require_equal("parameters", _on_host(parameters(moved)), _on_host(parameters(untouched)))
    same = all(np.array_equal(a, b) for a, b in zip(first.logprobs, second.logprobs, strict=True))
    require(same, "log-probs differ between eval_mode and train_mode")
    _check_offload_refusals(moved)
    return "equal to the last bit"


STATE_CHECKS: Mapping[str, Check] = {
    "accumulate": check_accumulation,
    "calls of one row": check_calls_of_one_row,
    "nothing scored": check_nothing_scored,
    "failure": check_failure,
    "not finite": check_not_finite,
    "offload": check_offload,
    "checkpoint": check_checkpoint,
}
"""Checks that compare an engine with itself."""


def _check_offload_refusals(engine: Engine) -> None:
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    engine.to("cpu", gradients=True)
    engine.zero_grad()
    require_refused(lambda: engine.optim_step(PARAMS), "optim_step after an offloaded gradient was dropped")
    require_refused(lambda: engine.to("cpu"), "`to` that moves nothing")
    require_refused(lambda: engine.to("tpu", model=True), "`to` an unknown device")


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _fails_on_two(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
    del entropy
    if inputs.num_datums == 2:
        raise ArithmeticError("my own mistake")
    return -logprobs.sum(), {}
