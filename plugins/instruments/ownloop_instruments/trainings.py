"""Two trainings side by side: the first step, verb and tensor that differ beyond rounding, and the term that does it.

A training is a run; a capsule; a batch that another framework dumped; or "ours", a recipe's default loss on the other
training's batch. `,NAME=VALUE` behind it changes a term.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from controller.commands.resume import forked_configuration, recording_file
from controller.runs.folder import HOST_FILE, METRICS, read_json, read_metrics
from controller.runs.loop_config import ABSENT, differences
from controller.runs.metric_rows import by_step
from controller.runs.models import resolve_model
from controller.runs.recording import RecordedEnv, read_recording
from ownloop_instruments.capsule import read_capsule, weights_of
from ownloop_instruments.computation import ROUNDING
from ownloop_instruments.dumps import Dump, read_dump
from ownloop_instruments.hypotheses import Hypothesis, hypotheses, tried
from ownloop_instruments.one_process import checkpoint_before
from ownloop_instruments.terms import Bench, DeadGroups, Denominator, Found, Results, Terms, apart, first_tensor
from rl.checks import check_known
from rl.losses import get_loss
from rl.rollouts.episodes import group_advantages, rollout_to_datum
from rl.system.disk import to_json
from rl.system.hf_config import read_config
from rl.types import Group
from trainer.config import TrainerConfig

_NAMES = {"loss": "loss_per_token", "clipped_tokens": "clipped_tokens", "grad_norm": "grad_norm"}
"""A run's metric -> the name of the same number in `Results`."""
_EXPLAINING = ("loss", "loss_config", "normaliser", "advantage", "sampling", "trainer", "lora")
_ROUNDING = 1e-5  # of float32, on one processor
_SAME = 1e-6  # two hypotheses that are so near cannot be told apart
_CHOICES = {"denominator": get_args(Denominator), "dead_groups": get_args(DeadGroups)}
_SEEDS = 256  # that are tried


@dataclass(frozen=True, kw_only=True)
class Training:
    """One side, at one step."""

    terms: Terms
    results: Results = dataclasses.field(default_factory=Results)
    """Recorded; without them the step is computed."""
    dump: Dump | None = None
    others: tuple[Hypothesis, ...] = ()


class RunSide:
    """A run, with its configuration, recording and metrics."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a loop without groups, and for a run without a recording."""
        self.path, self.config = path, forked_configuration(path, (), lambda _: None)
        if not hasattr(self.config, "advantage_function"):
            raise ValueError(f"{path} is a run of {type(self.config).__name__}; only loops with groups can be compared")
        self.steps, self.rows = read_recording(recording_file(path)), by_step(read_metrics(path / METRICS))

    def at(self, step: int, config: Any = None) -> Training:
        """The run at a step, or what it would be with another configuration.

        Raises ValueError if the weights before the step are not there.
        """
        config = config or self.config
        found, checkpoint = checkpoint_before(self.path, step)
        if found != step - 1:
            raise ValueError(
                f"{self.path} has no checkpoint of step {step - 1}, whose weights step {step} trained; run it again "
                "with --checkpoint-every 1 --keep-checkpoints N"
            )
        terms = replace(terms_of(self.steps[step], config), checkpoint=checkpoint)
        row = self.rows.get(step, {})
        known = {name: row[metric] for metric, name in _NAMES.items() if metric in row}
        return Training(terms=terms, results=Results(numbers=known))


def terms_of(groups: Sequence[Group], config: Any) -> Terms:
    """The terms of recorded groups under a loop's configuration, at the model's own weights."""
    pairs = [(each, group_advantages(each, config.advantage_function)) for each in groups]
    rows = [(rollout_to_datum(rollout, value), not values.any()) for group, values in pairs
            for rollout, value in zip(group.rollouts, values, strict=True) if rollout.num_sampled_tokens]  # fmt: skip
    data, dead = zip(*rows, strict=True) if rows else ((), ())
    kind = get_loss(config.loss).normaliser if config.normaliser == "paper" else config.normaliser
    return Terms(data=data, dead=dead, loss=config.loss, options=config.loss_config, denominator=kind,
                 max_tokens=config.sampling.max_tokens, model=resolve_model(config.model),
                 trainer=config.policy_config)  # fmt: skip


def recorded(source: str, model: Path | None, other: Training | None) -> Training:
    """A capsule, a dump or "ours". Raises ValueError for what cannot be read, and if the model is not named."""
    name, *changes = source.split(",")
    if name == "ours":
        if other is None:
            raise ValueError("'ours' is computed on the other training's batch, which must be a dump")
        training = Training(terms=other.terms)
    elif name.endswith(".capsule"):
        capsule = read_capsule(Path(name))
        terms = Terms(data=capsule.data, dead=(False,) * len(capsule.data), loss=capsule.loss, denominator="none",
                      options=capsule.loss_config, trainer=capsule.trainer_config(),
                      model=weights_of(capsule, "model", model) or Path(),
                      checkpoint=weights_of(capsule, "checkpoint", None))  # fmt: skip
        numbers = {"loss": capsule.computed.loss, "grad_norm": capsule.computed.grad_norm}
        training = Training(terms=terms, results=Results(numbers=numbers, values=capsule.computed.values))
    else:
        if not Path(name).is_file():
            raise ValueError(f"there is no recorded batch and no run {name}")
        if model is None:
            raise ValueError(f"--model is missing: the weights with which {name} was computed")
        dump = read_dump(Path(name))
        dead = tuple(not datum.loss_inputs["advantages"].any() for datum in dump.data)
        terms = Terms(data=dump.data, dead=dead, tokens_elsewhere=dump.tokens_elsewhere, model=model,
                      trainer=TrainerConfig(engine="fsdp2", compute_dtype="float32"))  # fmt: skip
        alive = None if dump.logprobs is None else tuple(p for p, d in zip(dump.logprobs, dead, strict=True) if not d)
        training = Training(terms=terms, results=Results(numbers=dump.numbers, logprobs=alive), dump=dump)
    return replace(training, terms=changed(training.terms, changes), results=Results()) if changes else training


def changed(terms: Terms, changes: Sequence[str]) -> Terms:
    """The terms with texts such as "denominator=sequences". Raises ValueError for a name that is none."""
    for text in changes:
        name, _, value = text.partition("=")
        if name in _CHOICES:
            check_known(name, value, _CHOICES[name])
            terms = replace(terms, **{name: value})
        elif name == "loss":
            terms = replace(terms, loss=value)
        elif name in ("engine", "compute_dtype", "head_dtype"):
            terms = replace(terms, trainer=replace(terms.trainer, **{name: value or None}))
        elif name == "rope_theta" or name.endswith(("_eps", "_epsilon")):
            terms = replace(terms, settings=(*terms.settings, (name, float(value))))
        else:
            terms = replace(terms, options={**terms.options, name: float(value)})
    get_loss(terms.loss, terms.options)
    return terms


def explain(bench: Bench, ours: Training, theirs: Training, where: str = "") -> tuple[bool, list[str]]:
    """Whether two trainings are equal at a step but for rounding, and sentences that say what differs, and why.

    A difference that may be rounding counts only if a single term takes nine tenths of it away.
    """
    theirs, order = _in_our_order(ours, theirs)
    found = bench.computed(ours.terms, layers=bool(theirs.results.values))
    own = max(apart(found, ours.results).values(), default=0.0)
    known, most = theirs.results, ROUNDING[ours.terms.trainer.compute_dtype]
    least = min(most, max(_ROUNDING, 3 * own))
    if not known.numbers and not known.values and theirs.dump is None:
        known = bench.computed(theirs.terms)
    known, said = (known, []) if theirs.dump is None else _with_their_loss(theirs.dump, found, ours.terms, known)
    if own > most:
        said.append(
            f"A's recorded step is not A computed here, apart by {own:.1e}: its layout, engine or version differs"
        )
    differs = {name: each for name, each in apart(found, known).items() if not each <= least}
    if not differs:
        return not order, [*order, *said, "equal but for rounding"]
    config = None if theirs.terms.model == ours.terms.model else read_config(theirs.terms.model)
    all_tried = tried(bench, (*ours.others, *hypotheses(ours.terms, config)), known)
    most_left = max(least, min(most, max(differs.values()) / 10))
    most_left = min(most_left, max(_SAME, 10 * all_tried[0][0]))
    fits = [each for each in all_tried if each[0] <= most_left]
    if not fits and max(differs.values()) <= most:
        return not order, [*order, *said, "equal but for rounding"]
    first = next(iter(differs))
    is_forward = first.startswith(("log-probs", "input of ", "output of "))
    verb = "forward" if is_forward else "optim_step" if first == "grad_norm" else "forward_backward"
    numbers = f"{found.numbers[first]:.6g} in A, {known.numbers[first]:.6g} in B, " if first in known.numbers else ""
    said.append(f"{where}{verb}: {first} {numbers}apart by {differs[first]:.1e}")
    other = bench.computed(fits[0][1].terms if fits else theirs.terms, layers=True)
    if tensor := first_tensor(bench.computed(ours.terms, layers=True), other, least):
        said.append(f"first tensor that differs: {tensor[0]}, by {tensor[1]:.1e}")
    return False, [*order, *said, *_verdict(fits, all_tried)]


def _verdict(fits: Sequence[tuple[float, Hypothesis]], nearest: Sequence[tuple[float, Hypothesis]]) -> Iterator[str]:
    for left, each in fits:
        yield f"{each.term}: {each.said} makes A's step B's, apart by {left:.1e}"
    if not fits:
        left, each = nearest[0]
        yield f"no single term explains it; the nearest, {each.term} ({each.said}), leaves {left:.1e}"


def _with_their_loss(dump: Dump, found: Found, terms: Terms, known: Results) -> tuple[Results, list[str]]:
    """Their loss beside ours, on our log-probs; it stands in where they recorded none."""
    parts = [[p, d.loss_inputs["logprobs"], d.loss_inputs["advantages"]] for p, d in
             zip(found.logprobs or (), terms.alive, strict=True)]  # fmt: skip
    scored = np.concatenate([datum.counted for datum in terms.alive])
    p, old, advantages = (torch.from_numpy(np.concatenate(each)[scored]).double() for each in zip(*parts, strict=True))
    count = sum(datum.num_loss_tokens for datum in dump.data) + dump.tokens_elsewhere
    value = float(dump.their_loss(p, torch.where(old.isnan(), p, old), advantages, count))
    said = f"loss {found.numbers['loss']:.6g} in A, {value:.6g} by {dump.framework}'s default formula"
    if "loss" not in known.numbers:
        return replace(known, numbers={"loss": value, **known.numbers}), [said]
    return known, [f"{said}, {known.numbers['loss']:.6g} in the file"]


def _in_our_order(ours: Training, theirs: Training) -> tuple[Training, list[str]]:
    """The other side's data in our order, and a sentence if it has another. Raises ValueError for other tokens."""
    keys = [[d.tokens.tobytes() + d.loss_inputs["target_tokens"].tobytes() for d in side.terms.data]
            for side in (ours, theirs)]  # fmt: skip
    if keys[0] == keys[1]:
        return theirs, []
    if missing := (Counter(keys[1]) - Counter(keys[0])).total() or abs(len(keys[1]) - len(keys[0])):
        raise ValueError(f"{missing} of B's {len(keys[1])} sequences have other tokens than A's {len(keys[0])}; all "
                         "must have the same")  # fmt: skip
    order = [keys[1].index(key) for key in keys[0]]
    data, dead = (tuple(each[i] for i in order) for each in (theirs.terms.data, theirs.terms.dead))
    there = replace(
        theirs, terms=replace(theirs.terms, data=data, dead=dead), results=replace(theirs.results, logprobs=None)
    )
    return there, ["data order: B has the same sequences in another order"]


def compare_runs(bench: Bench, a: RunSide, b: RunSide) -> tuple[bool, list[str]]:
    """Goes through the steps of two runs to the first that differs, and explains it; and says what else differs."""
    equal, said = _compare_steps(bench, a, b)
    hosts = [read_json(side.path / HOST_FILE) for side in (a, b)]
    pairs = {**differences(to_json(a.config), to_json(b.config)), **differences(hosts[0], hosts[1])}
    fields = [name for name, (_, theirs) in pairs.items() if theirs is not ABSENT]
    return equal, said if equal or not fields else [*said, f"A and B have other values of {', '.join(fields)}"]


def _compare_steps(bench: Bench, a: RunSide, b: RunSide) -> tuple[bool, list[str]]:
    steps = sorted(set(a.steps) & set(b.steps) & set(a.rows) & set(b.rows))
    for step in steps:
        if said := _sampled(bench, a, b, step):
            return False, [f"step {step}, {said[0]}", *said[1:]]
        rows = [[side.rows[step].get(name, np.nan) for name in _NAMES] for side in (a, b)]
        if not np.allclose(*rows, rtol=_ROUNDING, atol=1e-9, equal_nan=True):
            others = tuple(_changes(a, b, step))
            equal, said = explain(bench, replace(a.at(step), others=others), b.at(step), f"step {step}, ")
            if not equal:
                return False, said
        rates = [side.rows[step].get("learning_rate") for side in (a, b)]
        if rates[0] != rates[1]:
            return False, [f"step {step}, optim_step: learning_rate {rates[0]} in A, {rates[1]} in B"]
    return True, [f"equal but for rounding: {len(steps)} steps"]


def _changes(a: RunSide, b: RunSide, step: int) -> Iterator[Hypothesis]:
    """A's step with each single field of B's configuration in which they differ."""
    for path, (ours, theirs) in differences(to_json(a.config), to_json(b.config)).items():
        head, *rest = path.split(".")
        if head in _EXPLAINING:
            config = _with_field(a.config, b.config, [head, *rest])
            yield Hypothesis(term=path, said=f"{theirs!r} in place of {ours!r}", terms=a.at(step, config).terms)


def _with_field(ours: Any, theirs: object, path: Sequence[str]) -> object:
    """A configuration with one field of another; of a mapping, the whole of it."""
    own, other = getattr(ours, path[0]), getattr(theirs, path[0])
    if len(path) > 1 and dataclasses.is_dataclass(own) and type(own) is type(other):
        other = _with_field(own, other, path[1:])
    return replace(ours, **{path[0]: other})


def _sampled(bench: Bench, a: RunSide, b: RunSide, step: int) -> list[str]:
    """What differs in the rollouts of a step, and why; empty if nothing does."""
    ids = [[group.problem_id for group in side.steps[step]] for side in (a, b)]
    if ids[0] != ids[1]:
        first = next((pair for pair in zip(*ids, strict=False) if pair[0] != pair[1]), (len(ids[0]), len(ids[1])))
        return [f"generate: problem {first[0]!r} in A, {first[1]!r} in B", _why_other_problems(a, b, step, ids[1])]
    rollouts = [[(g.problem_id, r) for g in side.steps[step] for r in g.rollouts] for side in (a, b)]
    for (problem, x), (_, y) in zip(*rollouts, strict=True):
        parts = [[(turn.prompt_tokens, turn.completion) for turn in each.turns] for each in (x, y)]
        prompts, said, logprobs = ([[each(p, c) for p, c in side] for side in parts] for each in
                                   (lambda p, _: p, lambda _, c: c.tokens, lambda _, c: c.logprobs))  # fmt: skip
        if prompts[0][0] != prompts[1][0]:
            return [f"generate: {problem!r} has other tokens", "chat template or tokenizer: the problem is the same"]
        p, q = (np.concatenate(each) for each in logprobs)
        limit = ROUNDING[a.config.trainer.compute_dtype]
        if said[0] != said[1] or np.linalg.norm(p - q) > limit * np.linalg.norm(q):
            what = "answers" if said[0] != said[1] else "log-probs of the same answers"
            return [f"generate: other {what} to {problem!r}", *_why_other_tokens(bench, a, b, step)]
        if not np.isclose(x.reward, y.reward, rtol=1e-6, atol=1e-9):
            return [f"reward: {x.reward:g} in A, {y.reward:g} in B, for the same answer to {problem!r}",
                    "grader: another reward, which `ownloop regrade` looks into"]  # fmt: skip
    return []


def _why_other_problems(a: RunSide, b: RunSide, step: int, wanted: Sequence[str]) -> str:
    ids = [Counter(g.problem_id for n in side.steps for g in side.steps[n]) for side in (a, b)]
    if ids[0] == ids[1]:
        return "data order: the problems of all steps are the same, in another order"
    if not isinstance(a.config.env, RecordedEnv):
        count = a.config.prompts_per_step
        for seed in dict.fromkeys([b.config.seed, *range(_SEEDS)]):
            problems = a.config.env.train_problems(seed, (step - 1) * count, count)
            if [problem.id for problem in problems] == [*wanted]:
                return f"seed: {seed} in place of {a.config.seed} gives A's environment B's problems"
    return "environment: no seed gives A's environment B's problems"


def _why_other_tokens(bench: Bench, a: RunSide, b: RunSide, step: int) -> list[str]:
    """Whether A's policy gives B's tokens the log-probs that B recorded; else, which change of it does."""
    theirs = terms_of(b.steps[step], a.config)
    terms = replace(a.at(step).terms, data=theirs.data, dead=theirs.dead)
    known = Results(logprobs=tuple(np.where(d.counted, d.loss_inputs["logprobs"], np.nan) for d in terms.alive))
    limit = 10 * ROUNDING[a.config.trainer.compute_dtype]
    differs = apart(bench.computed(terms), known)["log-probs"]
    if differs <= limit:
        return [f"sampling seed: A's policy gives B's answers B's log-probs, apart by {differs:.1e}; the draws differ"]
    all_tried = tried(bench, hypotheses(terms), known)
    lines = [f"A's policy gives B's answers other log-probs, apart by {differs:.1e}"]
    return [*lines, *_verdict([each for each in all_tried if each[0] <= limit], all_tried)]
