"""A step as its terms: all that its loss and its gradient depend on. Each can be changed alone, and the step computed.

Terms --`Bench`, in this process--> Found           what came of it
Found, Results  --`apart`-->  name -> difference  how far it is from what another training recorded
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ownloop_instruments.computation import Summary, observed
from ownloop_instruments.one_process import dot, gradient, lone_engine
from rl.data.batching import plan_batch
from rl.losses import constant_length, get_loss, sequences_alike
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines.base import Engine

Array = NDArray[Any]
Denominator = Literal["tokens", "sequences", "constant", "none"]
DeadGroups = Literal["counted", "left_out"]
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a step."""

    data: tuple[Datum, ...]
    """Those without a signal too. Where the sampler's log-probs are NaN, they are the policy's own."""
    dead: tuple[bool, ...]
    """Whether a datum is of a group without a signal. Such data are not computed."""
    loss: str = "ppo"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    denominator: Denominator = "tokens"
    dead_groups: DeadGroups = "counted"
    """Whether the denominator counts groups without a signal."""
    tokens_elsewhere: int = 0
    """Tokens of other micro-batches, which the denominator counts."""
    max_tokens: int = 0
    """Of a completion, for the denominator "constant"."""
    trainer: TrainerConfig
    model: Path
    checkpoint: Path | None = None
    settings: tuple[tuple[str, float], ...] = ()
    """Numbers of the model's config.json that are others: (name, value)."""

    @property
    def alive(self) -> list[Datum]:
        """The data that are computed."""
        return [datum for datum, dead in zip(self.data, self.dead, strict=True) if not dead]

    def normalised(self) -> tuple[Sequence[Datum], float]:
        """The data to compute, and what their sum is multiplied with."""
        counted = self.data if self.dead_groups == "counted" else self.alive
        if self.denominator == "none":
            return self.alive, 1.0
        if self.denominator == "constant":
            return self.alive, constant_length(len(counted), self.max_tokens or max(len(d.tokens) for d in self.data))
        if self.denominator == "tokens":
            return self.alive, 1 / (sum(datum.num_loss_tokens for datum in counted) + self.tokens_elsewhere)
        length = sum(datum.num_loss_tokens for datum in self.alive) / len(self.alive)
        return sequences_alike(self.alive, length), 1 / (len(counted) * length)

    def changed_data(self, change: Callable[[Datum], Datum]) -> "Terms":
        """The same with each datum changed."""
        return replace(self, data=tuple(change(datum) for datum in self.data))


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a training recorded of a step."""

    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss`, `loss_per_token`, `clipped_tokens` and `grad_norm`, as far as they are known, in this order."""
    logprobs: tuple[Array, ...] | None = None
    """[T] of each datum that is computed, NaN where it is not known."""
    values: Mapping[str, Summary] = field(default_factory=dict[str, Summary])
    """Tensors, by name, in the order of their computation."""


@dataclass(frozen=True, kw_only=True)
class Found(Results):
    """What a step computed here."""

    size: float
    """Of the loss: the sum of the absolute values of its terms at a ratio of 1. The loss itself may be about 0."""


class Bench:
    """Computes steps in this process. It keeps an engine for the next step of the same weights."""

    def __init__(self) -> None:
        """There are no engines yet."""
        self._engines: dict[str, Engine] = {}

    def computed(self, terms: Terms, *, layers: bool = False) -> Found:
        """Computes a step; with `layers`, every module's first input and output too.

        Raises ValueError if no group has a signal.
        """
        engine, loss = self._engine(terms), get_loss(terms.loss, terms.options)
        data, scale = terms.normalised()
        if not data:
            raise ValueError("no group of the step has a signal, so nothing is computed")
        data = loss.prepared(_with_own_logprobs(engine, data))
        most = terms.trainer.max_tokens_per_microbatch
        plan = plan_batch(data, num_ranks=1, max_tokens_per_microbatch=most, share_prefixes=engine.shares_prefixes)
        if terms.denominator == "none":  # a capsule is one micro-batch, in its order
            plan = replace(plan, microbatches=((tuple(range(len(data))),),))
        seen: dict[str, Summary] = {}
        with observed(seen) if layers else contextlib.nullcontext():
            output = engine.forward_backward(plan.split(data)[0], loss)
        logprobs, found = plan.restore([output.logprobs]), gradient(engine)
        seen |= {f"log-probs of datum {n}": Summary.of(torch.from_numpy(p.copy())) for n, p in enumerate(logprobs)}
        total = output.metrics["loss"]
        seen["loss"] = Summary.of(torch.tensor([total * scale]))
        seen |= {f"gradient of {name}": Summary.of(each * scale) for name, each in found.items()}
        sizes = [float(np.abs(datum.weights * datum.loss_inputs["advantages"]).sum()) for datum in data]
        return Found(
            numbers=_numbers(terms, output.metrics, scale, dot(found, found) ** 0.5),
            logprobs=tuple(np.where(d.scored, p, np.nan) for d, p in zip(data, logprobs, strict=True)),
            values=seen,
            size=sum(sizes) * scale,
        )

    def _engine(self, terms: Terms) -> Engine:
        key = repr((terms.trainer, terms.model, terms.checkpoint, terms.settings))
        if key not in self._engines:
            plain = replace(terms, settings=())
            made = _changed(self._engine(plain), terms) if terms.settings else None
            made = made or lone_engine(terms.trainer, terms.model, terms.checkpoint)
            self._engines = {**dict([*self._engines.items()][:1]), key: made}  # the first, and this one
        return self._engines[key]


def _numbers(terms: Terms, metrics: Mapping[str, float], scale: float, norm: float) -> dict[str, float]:
    tokens = sum(datum.num_loss_tokens for datum in terms.data) + terms.tokens_elsewhere
    numbers = {"loss": metrics["loss"] * scale, "loss_per_token": metrics["loss"] / tokens}
    if "clipped_tokens" in metrics:
        numbers["clipped_tokens"] = metrics["clipped_tokens"] / metrics["num_loss_tokens"]
    return {**numbers, "grad_norm": norm * scale}


def apart(found: Found, known: Results) -> dict[str, float]:
    """Name -> relative difference, of all that `known` holds, in the order of their computation."""
    tensors = _tensors(found, known)
    differences: dict[str, float] = {}
    if known.logprobs is not None and found.logprobs is not None and len(known.logprobs) == len(found.logprobs):
        ours, theirs = np.concatenate(found.logprobs), np.concatenate(known.logprobs)
        both = np.isfinite(ours) & np.isfinite(theirs)
        if both.any():
            norm = max(float(np.linalg.norm(theirs[both])), _TINY)
            differences["log-probs"] = float(np.linalg.norm(ours[both] - theirs[both])) / norm
    for name, value in known.numbers.items():
        ours = found.numbers.get(name, np.nan)
        least = found.size if name.startswith("loss") else _TINY
        is_same = ours == value or (np.isnan(value) and np.isnan(ours) and name in found.numbers)
        differences[name] = 0.0 if is_same else abs(ours - value) / max(abs(ours), abs(value), least)
    return {**dict(itertools.takewhile(_is_forward, tensors)), **differences, **dict(tensors)}


def first_tensor(ours: Results, theirs: Results, limit: float) -> tuple[str, float] | None:
    """The first tensor that differs by more than `limit`, and by how much; None if there is none.

    Those of other shapes, which belong to other positions, are passed over.
    """
    return next((pair for pair in _tensors(ours, theirs) if limit < pair[1] < np.inf), None)


def _tensors(ours: Results, theirs: Results) -> list[tuple[str, float]]:
    """Names and differences of the tensors that both have. The loss is none: it may be about 0."""
    shared = (name for name in ours.values if name in theirs.values and name != "loss")
    return [(name, ours.values[name].difference(theirs.values[name])) for name in shared]


def _is_forward(tensor: tuple[str, float]) -> bool:
    return not tensor[0].startswith("gradient of ")


def _with_own_logprobs(engine: Engine, data: Sequence[Datum]) -> list[Datum]:
    """The data with the policy's own log-probs where the sampler's are not known: a ratio of 1."""
    filled: list[Datum] = []
    for datum in data:
        logprobs = datum.loss_inputs["logprobs"]
        if (unknown := np.isnan(logprobs)).any():
            own = engine.forward([[datum]]).logprobs[0] if (unknown & datum.counted).any() else 0
            logprobs = np.where(unknown, own, logprobs).astype(np.float32)
        filled.append(replace(datum, loss_inputs={**datum.loss_inputs, "logprobs": logprobs}))
    return filled


def _changed(engine: Engine, terms: Terms) -> Engine:
    """The engine's weights under another config.json."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        engine.export_hf(model, torch.float32)
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
        for name, value in terms.settings:
            holder(config, name)[name] = value
        (model / "config.json").write_text(json.dumps(config))
        return lone_engine(terms.trainer, model, None)


def holder(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of a config.json that has a number of this name."""
    rope = config.get("rope_parameters")
    return rope if isinstance(rope, dict) and name in rope else config
