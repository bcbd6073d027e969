"""A step of a run in one process: its micro-batches as the run's ranks had them, from its recorded rollouts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from controller.commands.resume import forked_configuration, recording_file
from controller.runs.folder import CONFIG_FILE, HOST_FILE, METRICS, read_json, read_metrics
from controller.runs.metric_rows import by_step
from controller.runs.models import resolve_model
from controller.runs.recording import read_recording
from ownloop_instruments.capsule import Capsule, digest_of, facts_here, source_of, trainer_json
from ownloop_instruments.computation import compute
from ownloop_instruments.cut import cut_at
from ownloop_instruments.one_process import checkpoint_before, dot, gradient, lone_engine
from rl.data.batching import plan_batch
from rl.losses import Loss, get_loss
from rl.rollouts.episodes import group_to_data
from rl.types import Datum
from trainer.engines.base import Engine

_WEIGHTS = ("model", "model_digest", "checkpoint", "checkpoint_digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A micro-batch of a rank of the run."""

    rank: int
    number: int
    """Among the rank's micro-batches."""
    datums: tuple[int, ...]
    """Their places in the step's batch."""


@dataclass(kw_only=True)
class Step:
    """A step of a run, and an engine with the weights that it trained."""

    run: Path
    number: int
    config: Any
    batch: Sequence[Datum]
    grad_scale: float
    parts: Sequence[Part]
    engine: Engine
    loss: Loss
    model: Path
    checkpoint: Path | None
    chosen: int = 0
    """The part that a capsule is made of, unless another is named."""

    def number_of(self, datum: int) -> int:
        """The part that has a datum. Raises ValueError for a datum that the step does not have."""
        found = [number for number, part in enumerate(self.parts) if datum in part.datums]
        if not found:
            raise ValueError(f"--datum is {datum}; step {self.number} has datums 0 to {len(self.batch) - 1}")
        return found[0]

    def data(self, number: int) -> tuple[Datum, ...]:
        """The datums of a part."""
        return tuple(self.batch[i] for i in self.parts[number].datums)

    def capsule(self, number: int, *, layers: bool, from_layer: int | None = None) -> Capsule:
        """Computes a part, and keeps it. If numbers of it are not finite, it looks at every module, too.

        With `from_layer` it keeps the layer's input and the weights from there on, and names no others.
        """
        part, state = self.parts[number], torch.get_rng_state()
        computed = compute(self.engine, self.data(number), self.loss, layers=layers)
        if not computed.is_finite and not layers:
            torch.set_rng_state(state)
            computed = compute(self.engine, self.data(number), self.loss, layers=True)
        cut, trainer = None, self.config.policy_config
        if from_layer is not None:
            cut, computed = cut_at(from_layer, self.engine, trainer, self.model, self.data(number), self.loss)
        facts = {
            "run": self.run.name,
            "step": self.number,
            "rank": part.rank,
            "microbatch": part.number,
            "datums": part.datums,
            "grad_scale": self.grad_scale,
            "loss_source": source_of(self.config.loss),
            "config": read_json(self.run / CONFIG_FILE),
            "host": read_json(self.run / HOST_FILE),
            "made": facts_here(),
        }
        return Capsule(
            data=self.data(number),
            loss=self.config.loss,
            loss_config=self.config.loss_config,
            trainer=trainer_json(trainer),
            facts=facts,
            weights=self._weights() if cut is None else dict.fromkeys(_WEIGHTS, ""),
            cut=cut,
            random_state=state.numpy().copy(),
            computed=computed,
        )

    def _weights(self) -> dict[str, str]:
        needs_model = self.checkpoint is None or self.config.lora is not None
        return {
            "model": str(self.model.absolute()),
            "model_digest": digest_of(self.model) if needs_model else "",
            "checkpoint": str(self.checkpoint.absolute()) if self.checkpoint else "",
            "checkpoint_digest": digest_of(self.checkpoint) if self.checkpoint else "",
        }


def microbatches_of(run: Path, number: int, *, nearest: bool) -> Step:
    """A step of a run, from its recording and its checkpoint.

    Raises ValueError for a step that was not recorded, that has nothing to learn from or whose weights are not there;
    and for loops whose data are not those of groups.
    """
    config = forked_configuration(run, (), lambda _: None)
    if not hasattr(config, "advantage_function"):
        raise ValueError(
            f"capsules are of loops that compare the rollouts of a group; {type(config).__name__} has none"
        )
    steps = read_recording(recording_file(run))
    if number not in steps:
        raise ValueError(f"--step is {number}; the run has recorded steps {min(steps)} to {max(steps)}")
    found, checkpoint = checkpoint_before(run, number)
    if found != number - 1 and not nearest:
        raise ValueError(
            f"step {number} trained the weights after step {number - 1}, and the newest checkpoint before it is of "
            f"step {found}; --nearest takes that, or run the steps between again: ownloop run --fork {run} --at "
            f"{found} --checkpoint-every 1"
        )
    loss = get_loss(config.loss, config.loss_config)
    loss.check_inputs(("logprobs", "advantages"))
    batch = [datum for group in steps[number] for datum in group_to_data(group, config.advantage_function)]
    if not batch:
        raise ValueError(f"step {number} had no group with different rewards, so nothing was computed")
    data, scale = config.normalised(batch, steps[number])
    trainer, model = config.policy_config, resolve_model(config.model)
    torch.set_num_threads(trainer.num_threads)
    engine, prepared = lone_engine(trainer, model, checkpoint), loss.prepared(data)
    plan = plan_batch(
        prepared,
        num_ranks=trainer.num_data_parallel_ranks,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        share_prefixes=engine.shares_prefixes,
    )
    parts = [Part(rank=r, number=n, datums=tuple(datums)) for r, rank in enumerate(plan.microbatches)
             for n, datums in enumerate(rank) if datums]  # fmt: skip
    return Step(run=run, number=number, config=config, batch=prepared, grad_scale=scale, parts=parts, engine=engine,
                loss=loss, model=model, checkpoint=checkpoint)  # fmt: skip


def whole_step(step: Step) -> Iterator[str]:
    """Computes all micro-batches and chooses one. Lines about each, and the gradient's norm beside the recorded one."""
    total, worst = dict[str, torch.Tensor](), -1.0
    for number, part in enumerate(step.parts):
        data = step.data(number)
        output = step.engine.forward_backward([data], step.loss)
        found = gradient(step.engine)
        norm = math.sqrt(dot(found, found))
        total = {name: each + total[name] if total else each for name, each in found.items()}
        if worst != math.inf and (not math.isfinite(norm) or norm > worst):
            step.chosen, worst = number, norm if math.isfinite(norm) else math.inf
        tokens = sum(len(datum.tokens) for datum in data)
        yield (
            f"rank {part.rank}, micro-batch {part.number}: {len(data)} datums, {tokens} tokens, "
            f"loss {output.metrics['loss']:.6g}, gradient norm {norm:.6g}"
        )
    recorded = by_step(read_metrics(step.run / METRICS)).get(step.number, {}).get("grad_norm", float("nan"))
    norm = math.sqrt(dot(total, total)) * step.grad_scale
    yield f"gradient norm of the step: {norm:.6g} here, {recorded:.6g} in the run"
