"""Checks of an engine of one rank. A check returns its measurement and raises ContractError if that is too much.

`MODEL_CHECKS` compare the engine with a reference. `STATE_CHECKS` compare it with itself, so that they hold for engines
of adapters too: calls that add up, failures, offload, checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ownloop_doctors.comparisons import (
    require,
    require_close,
    require_equal,
    require_names,
    sampled_otherwise,
    size_of_terms,
)
from rl.losses import LossInputs, get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams, Datum, ForwardBackwardOutput
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import (
    ReferencePolicy,
    gradients,
    importance_sampling,
    parameters,
    published,
    random_groups,
)

# AdamW makes a whole step of the smallest gradient; with this eps, not of one that is only a rounding error.
PARAMS = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
BATCH = [*random_batch((1, 17, 5, 40)), *random_groups([(7, (1, 4, 9, 4)), (20, (3, 3))], seed=1)]
MICROBATCHES = [BATCH[:3], [], BATCH[3:]]
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine to check."""

    build: Callable[[], Engine]
    """Makes an engine of one rank that computes in float32; each time with the same weights."""
    model: Path
    """The directory of its model."""
    scratch: Path
    """Where files may be written."""


Check = Callable[[Subject], str]


def step(engine: Engine) -> None:
    """An optimizer step on the batch."""
    engine.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    engine.optim_step(PARAMS, 0.01)


def check_loss(subject: Subject) -> str:
    """Log-probs, entropies and the loss equal transformers', and a forward pass leaves no gradient."""
    engine, reference = subject.build(), ReferencePolicy(subject.model)
    output = engine.forward(MICROBATCHES, entropy=True)
    worst = _require_scores(output, reference, BATCH)
    require(not gradients(engine), "there is a gradient after `forward`")
    require_refused(lambda: engine.optim_step(PARAMS), "optim_step without a gradient")
    trained = engine.forward_backward(MICROBATCHES, get_loss("importance_sampling"))
    expected = reference.backward(BATCH, importance_sampling)
    error = abs(trained.metrics["loss"] - expected) / size_of_terms(BATCH, output.logprobs)
    require(error <= _TOLERANCE, f"the loss is {trained.metrics['loss']}; {expected} is expected")
    num_tokens, counted = sum(datum.num_loss_tokens for datum in BATCH), trained.metrics["num_loss_tokens"]
    require(counted == num_tokens, f"num_loss_tokens is {counted}; {num_tokens} is expected")
    return f"log-probs within {worst:.0e}, loss within {error:.0e}"


def check_gradients(subject: Subject) -> str:
    """Every gradient is that of plain autograd."""
    return _check_gradients(subject, BATCH)


def check_distributions(subject: Subject) -> str:
    """Each datum is scored at its own temperature and among its own kept tokens, also where datums share a prefix."""
    batch = sampled_otherwise(BATCH)
    _require_scores(subject.build().forward([batch], entropy=True), ReferencePolicy(subject.model), batch)
    return _check_gradients(subject, batch)


def _check_gradients(subject: Subject, batch: Sequence[Datum]) -> str:
    engine, reference = subject.build(), ReferencePolicy(subject.model)
    engine.forward_backward([batch[:3], [], batch[3:]], get_loss("importance_sampling"))
    reference.backward(batch, importance_sampling)
    return f"within {require_close('gradients', gradients(engine), reference.gradients(), _TOLERANCE):.0e}"


def check_three_steps(subject: Subject) -> str:
    """Three steps with scaling, clipping and weight decay equal a loop in plain PyTorch."""
    engine, reference = subject.build(), ReferencePolicy(subject.model)
    weights = list(reference.model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    worst = 0.0
    for version in (1, 2, 3):
        engine.forward_backward(MICROBATCHES, get_loss("importance_sampling"))
        reference.backward(BATCH, importance_sampling)
        require_close(f"gradients of step {version}", gradients(engine), reference.gradients(), _TOLERANCE)
        result = engine.optim_step(PARAMS, 0.1)
        for weight in weights:
            assert weight.grad is not None
            weight.grad.mul_(0.1)
        norm = float(torch.nn.utils.clip_grad_norm_(weights, 0.5))
        assert norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        off = abs(result.grad_norm - norm) / norm
        require(off <= _TOLERANCE, f"grad_norm of step {version} is {result.grad_norm}; {norm} is expected")
        found = (result.policy_version, result.learning_rate, result.skipped)
        require(found == (version, 1e-3, False), f"step {version} returned version, learning rate and skipped {found}")
        error = require_close(
            f"parameters after step {version}", parameters(engine), reference.parameters(), _TOLERANCE
        )
        worst = max(worst, error)
    return f"parameters within {worst:.0e}"


def check_multipliers(subject: Subject) -> str:
    """A learning-rate multiplier acts on the parameters it names; one that names none is refused."""
    engine = subject.build()
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    before = parameters(engine), gradients(engine)
    wrong = {"*.q_proj.*": 1.0, "model.layer.*": 0.5}
    require_refused(
        lambda: engine.optim_step(replace(PARAMS, learning_rate_multipliers=wrong)), "a multiplier that matches nothing"
    )
    require_equal("parameters after a refused step", parameters(engine), before[0])
    require_equal("gradients after a refused step", gradients(engine), before[1])
    frozen = {"*.k_proj.*": 0.0, "model.layers.*": 0.5}
    engine.optim_step(replace(PARAMS, learning_rate_multipliers=frozen))
    for name, parameter in engine.hf_parameters():
        changed = not torch.equal(parameter, before[0][name])
        require(changed != (".k_proj." in name), f"{name} {'changed' if changed else 'did not change'}")
    return "by name"


def check_parameters_by_name(subject: Subject) -> str:
    """Parameters have the names and values of the model's files, in float32, and each of them is trained."""
    stored = load_file(subject.model / "model.safetensors")
    engine = subject.build()
    require_equal("parameters", parameters(engine), stored)
    step(engine)
    for name, parameter in engine.hf_parameters():
        require(parameter.dtype == torch.float32, f"{name} is {parameter.dtype}, not float32")
        require(not torch.equal(parameter, stored[name]), f"{name} did not change in a step")
    return f"{len(stored)} parameters"


def check_export(subject: Subject) -> str:
    """transformers loads what was trained."""
    engine = subject.build()
    step(engine)
    engine.export_hf(subject.scratch / "export", torch.float32)
    exported = ReferencePolicy(subject.scratch / "export").parameters()
    require_equal("exported parameters", exported, parameters(engine))
    return "equal"


def check_checkpoint_to_reference(subject: Subject) -> str:
    """The engine `torchtitan` loads the weights of a checkpoint."""
    return _exchange(subject, subject.build(), _reference_engine(subject), "checkpoint_to")


def check_checkpoint_from_reference(subject: Subject) -> str:
    """The weights of a checkpoint of the engine `torchtitan` can be loaded."""
    return _exchange(subject, _reference_engine(subject), subject.build(), "checkpoint_from")


def check_push(subject: Subject) -> str:
    """A push gives generators the parameters, of which none is forgotten."""
    engine = subject.build()
    step(engine)
    pushed = published(1, engine.hf_parameters())
    require_names("published parameters", pushed, load_file(subject.model / "model.safetensors"))
    require_equal("published parameters", pushed, parameters(engine))
    return "equal"


MODEL_CHECKS: Mapping[str, Check] = {
    "loss": check_loss,
    "gradients": check_gradients,
    "distributions": check_distributions,
    "three steps": check_three_steps,
    "learning-rate multipliers": check_multipliers,
    "parameters by name": check_parameters_by_name,
    "export": check_export,
    "checkpoint to torchtitan": check_checkpoint_to_reference,
    "checkpoint from torchtitan": check_checkpoint_from_reference,
    "push": check_push,
}
"""Checks of an engine that trains a whole model, of any model that transformers builds."""


def require_refused(call: Callable[[], object], what: str) -> None:
    """Raises ContractError unless the call raises ValueError."""
    try:
        call()
    except ValueError:
        return
    require(False, f"{what} was not refused with a ValueError")


def explode(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
    """A loss whose gradient is not finite."""
    del entropy, inputs
    return logprobs.sum() * float("nan"), {}


def _require_scores(output: ForwardBackwardOutput, reference: ReferencePolicy, batch: Sequence[Datum]) -> float:
    require(output.entropy is not None, "forward(entropy=True) returned no entropies")
    assert output.entropy is not None
    worst = 0.0
    for datum, logprobs, entropy in zip(batch, output.logprobs, output.entropy, strict=True):
        scored = datum.scored
        with torch.no_grad():
            expected = reference.logprobs(datum).numpy(), reference.entropy(datum).numpy()
        for actual, theirs in zip((logprobs, entropy), expected, strict=True):
            worst = max(worst, float(np.abs(actual - np.where(scored, theirs, 0)).max()))
    require(worst <= _TOLERANCE, f"log-probs or entropies differ by {worst:.1e}; at most {_TOLERANCE:.0e} is accepted")
    return worst


def _reference_engine(subject: Subject) -> Engine:
    return load_engine(TrainerConfig(model=subject.model, engine="torchtitan", compute_dtype="float32"))


def _exchange(subject: Subject, writer: Engine, reader: Engine, name: str) -> str:
    step(writer)
    writer.save_checkpoint(subject.scratch / name)
    step(reader)
    version = reader.load_checkpoint(subject.scratch / name, weights_only=True)
    require(version == reader.policy_version == 0, f"the version is {version} after weights_only; 0 is expected")
    require_equal("loaded parameters", parameters(reader), parameters(writer))
    step(reader)
    return "equal"


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
    found = [output.metrics.get(name) for name in ("loss", "num_loss_tokens")]
    require(found == [0.0, 0.0], f"loss and num_loss_tokens are {found}; [0.0, 0.0] is expected")
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
    found = (result.skipped, result.policy_version, engine.policy_version)
    require(found == (True, 1, 1), f"the step returned skipped, version and policy_version {found}")
    for each in (engine, untouched):
        step(each)
    require_equal("parameters after the next step", parameters(engine), parameters(untouched))
    return "skipped"


def check_checkpoint(subject: Subject) -> str:
    """Training continues from a checkpoint to the last bit."""
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
