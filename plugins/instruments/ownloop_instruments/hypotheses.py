"""What may differ between two trainings: the terms of one with a single one changed, and which of them explains it."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from ownloop_instruments.terms import Bench, Denominator, Results, Terms, apart, holder
from rl.losses import get_loss, option_defaults
from rl.system.hf_config import read_config
from rl.types import Datum

_BASES = (1e4, 1e5, 5e5, 1e6)
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_SMALL = (1e-5, 1e-6, 1e-8, 1e-12)
_UNBOUNDED = 1e6


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One term changed."""

    term: str
    said: str
    """What the other training would have in its place."""
    terms: Terms


def tried(bench: Bench, hypotheses: Iterable[Hypothesis], known: Results) -> list[tuple[float, Hypothesis]]:
    """All hypotheses with the largest difference that is left, the nearest first. Some cannot be computed."""
    found: list[tuple[float, Hypothesis]] = []
    for each in hypotheses:
        with contextlib.suppress(ValueError):  # the model, the engine or the loss does not allow it
            left = apart(bench.computed(each.terms), known).values()
            found.append((max((x if x == x else np.inf for x in left), default=np.inf), each))
    return sorted(found, key=lambda each: each[0])


def hypotheses(terms: Terms, theirs: Mapping[str, Any] | None = None) -> Iterator[Hypothesis]:
    """Every single change. `theirs` is the config.json of the other training's model, if that is known."""
    yield from _of_the_loss(terms)
    yield from _of_the_data(terms)
    yield from _of_the_model(terms, theirs or {})


def _of_the_loss(terms: Terms) -> Iterator[Hypothesis]:
    for kind in get_args(Denominator):
        if kind not in (terms.denominator, "none") and terms.denominator != "none":
            said = f"{kind} in place of {terms.denominator}"
            yield Hypothesis(term="loss denominator", said=said, terms=replace(terms, denominator=kind))
    if any(terms.dead):
        other = "left_out" if terms.dead_groups == "counted" else "counted"
        tokens = sum(datum.num_loss_tokens for datum, dead in zip(terms.data, terms.dead, strict=True) if dead)
        said = f"{sum(terms.dead)} sequences of {tokens} tokens without a signal are {other.replace('_', ' ')}"
        yield Hypothesis(term="dead groups in the denominator", said=said, terms=replace(terms, dead_groups=other))
    loss = get_loss(terms.loss, terms.options)
    both = {**option_defaults(loss.function), **loss.options}
    if "clip_low_threshold" in both:
        low, high = (cast("float", both[f"clip_{side}_threshold"]) for side in ("low", "high"))
        for bounds in ((0.0, high), (low, _UNBOUNDED), (0.0, _UNBOUNDED), (max(2 - high, 0), 2 - low), (0.8, 1.2),
                       (0.8, 1.28)):  # fmt: skip
            if bounds != (low, high) and bounds[0] <= bounds[1]:
                options = {**terms.options, "clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}
                said = f"{_bounds(*bounds)} in place of {_bounds(low, high)}"
                yield Hypothesis(term="clip side", said=said, terms=replace(terms, options=options))


def _bounds(low: float, high: float) -> str:
    sides = [f"below {low:g}"] * (low > 0) + [f"above {high:g}"] * (high < _UNBOUNDED)
    return f"clipped {' and '.join(sides)}" if sides else "not clipped"


def _of_the_data(terms: Terms) -> Iterator[Hypothesis]:
    for by, said in ((1, "to the right"), (-1, "to the left")):
        changed = terms.changed_data(lambda datum, by=by: shifted(datum, by))
        yield Hypothesis(term="mask shifted by one", said=said, terms=changed)
    ends = end_tokens(terms.model)
    if any(np.isin(datum.loss_inputs["target_tokens"][datum.counted], ends).any() for datum in terms.data):
        changed = terms.changed_data(lambda datum: _without_end(datum, ends))
        yield Hypothesis(term="end token dropped", said=f"targets {ends} are not scored", terms=changed)
    changed = terms.changed_data(_without_last)
    yield Hypothesis(term="end token dropped", said="the last token of each sequence is not scored", terms=changed)
    own = terms.changed_data(lambda d: _with(d, logprobs=np.full(len(d.tokens), np.nan, np.float32)))
    yield Hypothesis(term="old log-probs", said="the trainer's own, so that all ratios are 1", terms=own)
    if any(datum.temperature != 1 for datum in terms.data):
        changed = terms.changed_data(lambda datum: replace(datum, temperature=1.0))
        yield Hypothesis(term="temperature", said="1 in place of the sampler's", terms=changed)


def _with(datum: Datum, **inputs: object) -> Datum:
    return replace(datum, loss_inputs={**datum.loss_inputs, **inputs})


def shifted(datum: Datum, by: int) -> Datum:
    """The datum with its mask moved by one place. A place that is new has the sequence's advantage."""
    weights, advantages = datum.weights, datum.loss_inputs["advantages"]
    moved = np.roll(weights, by)
    moved[0 if by > 0 else -1] = 0
    own = advantages[weights != 0]
    new = (moved != 0) & (weights == 0)
    return _with(
        datum,
        weights=moved,
        advantages=np.where(new, own[0 if by < 0 else -1] if len(own) else 0, advantages).astype(np.float32),
        logprobs=np.where(new, np.nan, datum.loss_inputs["logprobs"]).astype(np.float32),
    )


def _without_end(datum: Datum, ends: Sequence[int]) -> Datum:
    is_end = np.isin(datum.loss_inputs["target_tokens"], ends)
    return _with(datum, weights=np.where(is_end, np.float32(0), datum.weights))


def _without_last(datum: Datum) -> Datum:
    weights = datum.weights.copy()
    weights[np.flatnonzero(weights)[-1:]] = 0
    return _with(datum, weights=weights)


def end_tokens(model: Path) -> list[int]:
    """The tokens that end a sequence, by the model's configurations."""
    files = [model / name for name in ("config.json", "generation_config.json")]
    named = [json.loads(file.read_text()).get("eos_token_id") for file in files if file.is_file()]
    return sorted({int(i) for each in named for i in (each if isinstance(each, list) else [each]) if i is not None})


def _of_the_model(terms: Terms, theirs: Mapping[str, Any]) -> Iterator[Hypothesis]:
    trainer = terms.trainer
    if trainer.compute_dtype == "bfloat16":
        other = None if trainer.head_dtype else "float32"
        said = f"{other or 'bfloat16'} in place of {trainer.head_dtype or 'bfloat16'}"
        yield Hypothesis(
            term="head's dtype", said=said, terms=replace(terms, trainer=replace(trainer, head_dtype=other))
        )
    other = "float32" if trainer.compute_dtype == "bfloat16" else "bfloat16"
    changed = replace(trainer, compute_dtype=other, head_dtype=None)
    said = f"{other} in place of {trainer.compute_dtype}"
    yield Hypothesis(term="compute dtype", said=said, terms=replace(terms, trainer=changed))
    if trainer.lora is not None:  # an adapter has no config.json of its own
        return
    config = {**read_config(terms.model)}
    for term, names, values in (("rope base", ("rope_theta",), _BASES), ("norm's eps", _EPS, _SMALL)):
        for name in names:
            if (own := holder(config, name).get(name)) is None:
                continue
            ours = dict(terms.settings).get(name, own)
            for value in {holder({**theirs}, name).get(name, own), own, *values} - {ours}:
                changed = replace(terms, settings=(*terms.settings, (name, float(value))))
                yield Hypothesis(term=term, said=f"{name} {value:g} in place of {ours:g}", terms=changed)
