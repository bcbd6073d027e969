"""The trainer of a run in this process: one rank with the run's model and weights, whatever layout the run has."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from controller.runs.checkpoints import POLICY
from controller.runs.folder import LOOP_FILE, complete_checkpoints, read_json
from controller.runs.models import resolve_model
from ownloop_instruments.regrade import Graded
from rl.data.batching import plan_batch
from rl.losses import get_loss
from rl.rollouts.episodes import group_to_data
from rl.types import Group
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine

Gradient = Mapping[str, torch.Tensor]
_ONE_RANK = dict.fromkeys(
    ("data_parallel_shard", "data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel",
     "expert_parallel"), 1
)  # fmt: skip


def lone_engine(config: TrainerConfig, model: Path, checkpoint: Path | None) -> Engine:
    """A trainer's engine as a single rank; with `lora`, its adapter. Without a checkpoint it has the model's weights.

    `checkpoint` is a trainer's folder within that of a run's step.
    """
    engine = load_engine(replace(config, model=model, gpus=None, placement="split", profile_steps="", **_ONE_RANK))
    if config.lora is not None:
        engine = engine.adapter(POLICY, config.lora)
    if checkpoint is not None:
        engine.load_checkpoint(checkpoint)
    return engine


def checkpoint_before(run: Path, step: int) -> tuple[int, Path | None]:
    """The newest checkpoint before a step, with its own step; 0 and None where only the model's weights are left."""
    found = {read_json(path / LOOP_FILE)["step"]: path for path in complete_checkpoints(run / "checkpoints")}
    newest = max((number for number in found if number < step), default=0)
    return newest, found[newest] / POLICY if newest else None


def gradient_cosines(run: Path, config: Any, graded: Sequence[Graded]) -> Iterator[str]:
    """Lines that compare the gradients of a step's groups under the old and the new rewards, of each task too.

    Raises ValueError for a loop without advantages of groups, and if there are no groups.
    """
    if not hasattr(config, "advantage_function"):
        raise ValueError(
            f"--gradient is for loops that compare the rollouts of a group; {type(config).__name__} has none"
        )
    if not graded:
        raise ValueError("--gradient names a step that the recording does not have")
    get_loss(config.loss, config.loss_config).check_inputs(("logprobs", "advantages"))
    step, checkpoint = checkpoint_before(run, graded[0].step)
    engine = lone_engine(config.policy_config, resolve_model(config.model), checkpoint)
    weights = f"the weights of checkpoint {step}" if checkpoint else "the model's first weights"
    yield f"gradients of step {graded[0].step} at {weights}, under the old and the new rewards:"
    tasks = sorted({each.task for each in graded})
    for name in ("", *(tasks if len(tasks) > 1 else ())):
        part = [each for each in graded if not name or each.task == name]
        old, new = (_gradient(engine, config, groups) for groups in ([g.before for g in part], [g.group for g in part]))
        yield f"  {name or 'all':<12} {_compared(old, new)}"


def _gradient(engine: Engine, config: Any, groups: Sequence[Group]) -> Gradient:
    """The step's gradient; empty if no group has a signal."""
    batch = [datum for group in groups for datum in group_to_data(group, config.advantage_function)]
    if not batch:
        return {}
    data, scale = config.normalised(batch, groups)
    checked = get_loss(config.loss, config.loss_config)
    plan = plan_batch(
        batch,
        num_ranks=1,
        max_tokens_per_microbatch=config.trainer.max_tokens_per_microbatch,
        share_prefixes=engine.shares_prefixes,
    )
    (microbatches,) = plan.split(checked.prepared(data))
    engine.forward_backward(microbatches, checked)
    return {name: each * scale for name, each in gradient(engine).items()}


def gradient(engine: Engine) -> Gradient:
    """The accumulated gradient on the CPU, by Hugging Face name; the engine has none afterwards."""
    found = {name: p.grad.detach().float().cpu().clone() for name, p in engine.hf_parameters() if p.grad is not None}
    engine.zero_grad()
    return found


def dot(one: Gradient, other: Gradient) -> float:
    """Their inner product, in float64: a sum of so many numbers has too few digits in float32."""
    return sum(float(each.flatten().double() @ other[name].flatten().double()) for name, each in one.items())


def _compared(old: Gradient, new: Gradient) -> str:
    if not old or not new:
        without = [name for name, each in (("old", old), ("new", new)) if not each]
        return f"no gradient under the {' and the '.join(without)} rewards"
    norms = math.sqrt(dot(old, old)), math.sqrt(dot(new, new))
    cosine = min(max(dot(old, new) / (norms[0] * norms[1]), -1.0), 1.0)
    return f"cosine {cosine:+.4f}, norm {norms[0]:.4g} and {norms[1]:.4g}"
