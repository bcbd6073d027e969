"""What several ranks of an engine must do: what one rank does.

Every layout runs the same script on each of its ranks, and so does one rank. The checks compare what rank 0 saw.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownloop_doctors.comparisons import require, require_close, require_names, sampled_otherwise
from rl.losses import LossInputs, get_loss
from rl.system.hf_config import experts_of, read_config
from rl.tiny_models import random_batch
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import LENGTHS, full, plan, spawn, whole
from trainer.engines.contract.reference import ReferencePolicy, published, random_groups, routed

PARAMS = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5, weight_decay=0.1)
Build = Callable[[TrainerConfig], Engine]
"""Makes a rank's engine. Ranks are other processes, so it is a function of a module, or a `partial` of one."""
Script = Callable[[Build, TrainerConfig, int, Path], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LayoutResults:
    """What the script left behind."""

    config: TrainerConfig
    many: dict[str, Any]
    """What rank 0 of the layout saw."""
    one: dict[str, Any]
    """What one rank saw."""
    directory: Path
    """Where the ranks of the layout wrote."""
    build: Build


def run_layout(script: Script, build: Build, config: TrainerConfig, directory: Path) -> dict[str, Any]:
    """Results of the script on rank 0 of a layout; with one rank, it runs in this process."""
    directory.mkdir(parents=True, exist_ok=True)
    if config.num_ranks == 1:
        return script(build, config, 0, directory)
    spawn(config.num_ranks, _save_results, script, build, config, directory)
    return torch.load(directory / "results.pt", weights_only=False)


def layout_script(build: Build, config: TrainerConfig, rank: int, directory: Path) -> dict[str, Any]:
    """Gradients, a failing loss, three steps, a checkpoint, an export, a push, and a batch that scores nothing."""
    engine = build(config)
    index = config.data_parallel_rank(rank)
    batch = random_batch(LENGTHS)
    alike = random_groups([(3, (5, 6)), (2, (4,)), (1, (3,)), (4, (2, 2))], opening=10)

    def local_batch(data: list[Datum]) -> list[list[Datum]]:
        return plan(config, data).split(data)[index]

    otherwise = _otherwise(batch, config)
    results: dict[str, Any] = {"gradients_otherwise": _gradients(engine, local_batch(otherwise))}
    output = engine.forward_backward(local_batch(batch[:4]), get_loss("importance_sampling"))
    results |= {"logprobs": output.logprobs, "metrics": output.metrics}
    engine.forward(local_batch(batch))  # leaves the gradient as it is
    engine.forward_backward(local_batch(batch[4:5]), get_loss("importance_sampling"))  # fewer datums than ranks
    engine.forward_backward(local_batch(alike), get_loss("importance_sampling"))
    results["gradients"] = whole(engine, gradients=True)
    try:
        engine.forward_backward(local_batch(batch), get_loss(fail_on_the_longest))
    except (ArithmeticError, RuntimeError) as error:
        results["error"] = f"{type(error).__name__}: {error}"
    results["gradients_after_error"] = whole(engine, gradients=True)
    try:
        engine.optim_step(replace(PARAMS, learning_rate_multipliers={"model.layers.9.*": 1.0}), 0.1)
    except ValueError as error:
        results["unmatched"] = str(error)
    # Of a pipeline, one rank holds layer 0.
    steps = [engine.optim_step(replace(PARAMS, learning_rate_multipliers={"*model.layers.0.*": 1.0}), 0.1)]
    for _ in range(2):
        engine.forward(local_batch(batch))  # gathers parameters, which must not outlive the step
        engine.forward_backward(local_batch(batch), get_loss("cross_entropy"))
        steps.append(engine.optim_step(replace(PARAMS, grad_clip_norm=0.0), 0.01))
    results["grad_norms"] = [step.grad_norm for step in steps]
    results["parameters"] = whole(engine)
    engine.save_checkpoint(directory / "checkpoint", asynchronous=True)  # while the ranks continue below
    engine.export_hf(directory / "export", torch.float32)
    if config.lora is not None:
        engine.export_peft(directory / "export_peft", torch.float32)
    results["published"] = published(3, engine.hf_parameters())
    results["forward"] = engine.forward(local_batch(batch), entropy=True)
    engine.wait_for_checkpoint()
    engine.forward_backward(local_batch(batch), get_loss("cross_entropy"))
    engine.optim_step(PARAMS)
    results["loaded_version"] = engine.load_checkpoint(directory / "checkpoint")
    results["loaded"] = whole(engine)
    silent = [replace(d, loss_inputs={**d.loss_inputs, "weights": np.zeros(len(d.tokens), np.float32)}) for d in batch]
    output = engine.forward_backward(local_batch(silent), get_loss("cross_entropy"))
    results["nothing_scored"] = (output.metrics["loss"], engine.optim_step(PARAMS).grad_norm)
    return results


def _otherwise(batch: list[Datum], config: TrainerConfig) -> list[Datum]:
    """The datums as if sampled at other temperatures, from other sets and, if the engine replays them, experts."""
    experts = experts_of(read_config(config.model)) if find_engine(config.engine).replays_routes else None
    return routed(sampled_otherwise(batch), experts)


def _gradients(engine: Engine, microbatches: Sequence[Sequence[Datum]]) -> dict[str, Tensor]:
    """The gradient of one call, which is dropped then."""
    engine.forward_backward(microbatches, get_loss("importance_sampling"))
    gradients = whole(engine, gradients=True)
    engine.zero_grad()
    return gradients


def fail_on_the_longest(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
    """A loss that raises on the rank with the longest datum only."""
    del entropy, inputs
    if len(logprobs) >= 40 * 2 // 3:
        raise ArithmeticError("the longest datum is here")
    return -logprobs.sum(), {}


def check_gradients(results: LayoutResults) -> str:
    """Gradients equal one rank's, at any temperatures, among any kept tokens, and of a mixture with any experts."""
    names = ("gradients", "gradients_otherwise")
    return f"within {max(require_close(name, results.many[name], results.one[name], 1e-5) for name in names):.0e}"


def check_failure(results: LayoutResults) -> str:
    """A loss that raises on one rank raises on all and changes nothing."""
    raised = results.many.get("error", "nothing")
    expected = "longest datum" in raised or "RankFailureError" in raised
    require(expected, f"rank 0 raised {raised} when the loss of one rank raised")
    # 0.0: to the last bit
    require_close("gradients", results.many["gradients_after_error"], results.many["gradients"], 0.0)
    return "gradient as it was"


def check_multiplier(results: LayoutResults) -> str:
    """A learning-rate multiplier is refused if it matches no parameter of any rank."""
    require("unmatched" in results.many, "a multiplier that matches no parameter was not refused")
    return "refused if no rank has the parameter"


def check_steps(results: LayoutResults) -> str:
    """Three steps equal one rank's."""
    many, one = results.many, results.one
    norms = [abs(a - b) / b for a, b in zip(many["grad_norms"], one["grad_norms"], strict=True)]
    limit = _limit_after_steps(one["parameters"])
    require(max(norms) <= limit, f"gradient norms are {many['grad_norms']}; {one['grad_norms']} are expected")
    return f"parameters within {close_after_steps(results, 'parameters'):.0e}"


def check_checkpoint(results: LayoutResults) -> str:
    """A checkpoint restores every bit, in its own layout and on one rank."""
    many = results.many
    require(many["loaded_version"] == 3, f"load_checkpoint returned version {many['loaded_version']}; 3 is expected")
    require_close("loaded parameters", many["loaded"], many["parameters"], 0.0)
    one = TrainerConfig(  # resharded: saved by many, loaded by one
        model=results.config.model, engine=results.config.engine, compute_dtype="float32", lora=results.config.lora
    )
    engine = results.build(one)
    version = engine.load_checkpoint(results.directory / "checkpoint")
    require(version == 3, f"load_checkpoint returned version {version} on one rank; 3 is expected")
    loaded = {name: full(parameter) for name, parameter in engine.hf_parameters()}
    require_close("parameters loaded on one rank", loaded, many["parameters"], 0.0)
    return "equal, also on one rank"


def check_push(results: LayoutResults) -> str:
    """A push gives generators all parameters of all ranks."""
    require_close("published parameters", results.many["published"], results.many["parameters"], 0.0)
    return f"within {close_after_steps(results, 'published'):.0e} of one rank's"


def check_forward(results: LayoutResults) -> str:
    """A forward pass after a step uses the new parameters, which the export holds."""
    config, batch = results.config, random_batch(LENGTHS)
    exported = ReferencePolicy(results.directory / "export")
    mine = [i for microbatch in plan(config, batch).microbatches[0] for i in microbatch]
    output, worst = results.many["forward"], 0.0
    for k, i in enumerate(mine):
        scored = batch[i].scored
        with torch.no_grad():
            expected = exported.logprobs(batch[i]).numpy(), exported.entropy(batch[i]).numpy()
        for actual, theirs in zip((output.logprobs[k], output.entropy[k]), expected, strict=True):
            worst = max(worst, float(np.abs(actual - np.where(scored, theirs, 0)).max()))
    # looser: three steps have moved the weights apart
    require(worst <= 1e-4, f"log-probs or entropies differ by {worst:.1e} from the exported model's")
    return f"within {worst:.0e} of the export's"


def check_nothing_scored(results: LayoutResults) -> str:
    """A batch of which no token is scored has a loss of 0 and a gradient of zeros, which makes a step."""
    found = results.many["nothing_scored"]
    require(found == (0.0, 0.0), f"loss and grad_norm are {found}; (0.0, 0.0) is expected")
    return "a gradient of zeros"


LAYOUT_CHECKS: Mapping[str, Callable[[LayoutResults], str]] = {
    "gradients": check_gradients,
    "failure of one rank": check_failure,
    "learning-rate multipliers": check_multiplier,
    "three steps": check_steps,
    "checkpoint": check_checkpoint,
    "push": check_push,
    "forward": check_forward,
    "nothing scored": check_nothing_scored,
}


def close_after_steps(results: LayoutResults, what: str) -> float:
    """Does what `require_close` does, but leaves out the few elements whose first gradient is nothing but rounding.

    Adam makes a whole step of the smallest gradients, rounding included; an expert of few tokens has many.
    """
    many, one = results.many, results.one
    require_names(what, many[what], one[what])
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    num_left_out = 0
    for name, gradient in one["gradients"].items():
        # AdamW's first step has the size of its sign alone
        rounding = (gradient != 0) & (gradient.abs() < 1e-5 * gradient.square().mean().sqrt())
        num_left_out += int(rounding.sum())
        for tensors, of_layout in zip(kept, (many, one), strict=True):
            tensors[name] = of_layout[what][name].masked_fill(rounding, 0.0)
    require(num_left_out < 10, f"{num_left_out} elements of the gradient are nothing but rounding")
    return require_close(what, *kept, _limit_after_steps(one[what]))


def _limit_after_steps(parameters: Mapping[str, Tensor]) -> float:
    """The largest relative error after three steps. Routers round, and tokens near a tie go to other experts."""
    return 1e-4 if any(".experts." in name for name in parameters) else 1e-5


def _save_results(rank: int, script: Script, build: Build, config: TrainerConfig, directory: Path) -> None:
    results = script(build, config, rank, directory)
    if rank == 0:
        torch.save(results, directory / "results.pt")
