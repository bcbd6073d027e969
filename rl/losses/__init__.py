"""Losses by name, and the normalisers of their gradients.

A loss is a pure function of log-probs or values, with options that are checked before any rank computes. It sees no
model, no batch layout and no rank. It returns a sum over tokens, never a mean; the loop chooses the normaliser at
`optim_step`, and can do so after all rollout batches of a step are known: `token_mean`, `constant_length` and
`sequence_mean` return the `grad_scale`. `Loss.normaliser` says which of them the loss's paper has.

To add a loss, write a function in `functions.py` and add a row to `LOSSES`. A plug-in brings losses as
`rl.algorithms.Algorithms`. This package imports torch only for type checking, because the controller, which checks
names and options, does not need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_type_hints
from weakref import WeakSet

from rl.algorithms import Algorithms
from rl.checks import (
    check_at_least,
    check_known,
    did_you_mean,
    frames_below,
    named_function,
)
from rl.configuration import NotNegative, check_value
from rl.losses.functions import cispo, cross_entropy, dro, gspo, importance_sampling, ppo
from rl.losses.functions import value as value_loss
from rl.losses.shared import (
    IMPORTANCE_OPTIONS,
    KL_OPTIONS,
    TERM_OPTIONS,
    LossFunction,
    LossInputs,
    Metrics,
    SharedOptions,
    with_observations,
)
from rl.system.plugins import load_all
from rl.types import Datum, Head

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LOSSES",
    "Loss",
    "LossInputs",
    "all_losses",
    "constant_length",
    "get_loss",
    "sequence_mean",
    "sequences_alike",
    "token_mean",
]
Normaliser = Literal["tokens", "sequences", "constant"]
"""A mean over tokens, a mean over sequences of their means over tokens, or a division by what no length enters."""
RESERVED_METRICS = frozenset(
    {"loss", "num_loss_tokens", "memory_peak_bytes_max", "seconds_engine_max", "model_flops", "peak_flops"}
)
"""What a `forward_backward` reports besides the metrics of its loss."""
_REQUIRED: object = inspect.Parameter.empty
"""Stands for the default of an option without one, and for the type of a parameter that declares none."""
_NEEDED_FOR = {
    "old_logprobs": " (the trainer's log-probs, from a `forward` before the first optimizer step) because"
    " importance_cap is above 0 and it clips; leave importance_cap at 0, or choose loss 'importance_sampling', which"
    " does not clip",
    "reference_logprobs": " (a reference model's log-probs) because kl_coef is above 0; leave kl_coef at 0",
}
"""Loss input -> what a user can do who did not know that an option asks for it."""
_SHARED_KINDS = get_type_hints(SharedOptions, include_extras=True)
_INPUTS = ("logprobs", "advantages")
_OPTIONS = (*KL_OPTIONS, *TERM_OPTIONS, *IMPORTANCE_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss function with its options and requirements."""

    name: str
    function: LossFunction
    normaliser: Normaliser = "tokens"
    """What its paper divides the sum by, and a recipe too unless it names another."""
    required_inputs: tuple[str, ...] = ()
    """Names besides `target_tokens` that every datum's `loss_inputs` must hold, given the options that are set."""
    head: Head | None = "lm"
    """The head that the model must have; None for a user's function, which accepts any."""
    needs_entropy: bool = False
    """Whether the trainer has to compute the entropy, which costs time and memory."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The function's own options that were set."""
    takes: tuple[str, ...] = ()
    """Names of the shared options that the loss accepts."""
    shared: SharedOptions = field(default_factory=SharedOptions)
    """Values of the shared options."""
    clips: bool = False
    """Whether it clips its importance ratio. With `importance_cap` it then needs `old_logprobs`: without them that
    ratio would be 1, and never clipped."""
    prepare: Callable[[Sequence[Datum], Mapping[str, object]], list[Datum]] | None = None
    """(batch, options) -> the batch with the loss inputs that need all of it, such as a rank among its tokens. The
    controller calls it once for each `forward_backward`."""
    checks_values: bool = True
    """Whether `with_options` checks the ranges of options. A user's function checks its own; only types are checked."""

    def __call__(self, scores: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Evaluates the loss on one micro-batch. The metrics are detached. The function sees no reported position.

        `scores` [S] are log-probs, or values if the model has a value head; `entropy` is then None.
        """
        self.check_inputs(inputs.arrays)
        observed = self.shared.of_observations(scores, inputs) if self.shared.observation_coef > 0 else None
        rows, inputs = inputs.counted()
        scores, entropy = scores[rows], None if entropy is None else entropy[rows]
        function = partial(self.function, **self.options)
        if self.takes:
            loss, metrics = self.shared.apply(function, scores, entropy, inputs)
        else:
            with self._naming_inputs(inputs):
                result = function(scores, entropy, inputs)
            loss, metrics = self._checked(result, scores)
            self._check_sum(function, loss, scores, entropy, inputs)
        if observed is not None:
            loss, metrics = loss + self.shared.observation_coef * observed, {**metrics, "observation_loss": observed}
        if reserved := sorted(RESERVED_METRICS & metrics.keys()):
            raise ValueError(
                f"loss {self.name!r} returned a metric {reserved[0]!r}, which the trainer reports; rename it"
            )
        return loss, {name: value.detach() for name, value in metrics.items()}

    @contextmanager
    def _naming_inputs(self, inputs: LossInputs) -> Generator[None]:
        """Notes where a function of the user's raised. Raises ValueError for an input that it asks for in vain."""
        try:
            yield
        except Exception as error:
            if self.checks_values:
                raise
            where = frames_below(error, __file__)
            if isinstance(error, KeyError) and error.args and error.args[0] not in inputs.arrays:
                given = ", ".join(sorted(inputs.arrays))
                raise ValueError(
                    f"loss {self.name!r} raised KeyError: {error}; there are the inputs {given}{where}"
                ) from error
            error.add_note(f"loss {self.name!r} raised it in{where}")
            raise

    def _checked(self, result: object, scores: Tensor) -> tuple[Tensor, Metrics]:
        """What a function returned, numbers among its metrics as tensors. Raises ValueError if it is something else."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise ValueError(f"loss {self.name!r} returned a {type(result).__name__}; it must be (loss, metrics)")
        loss, metrics = (
            result[0],
            {
                name: scores.new_tensor(x) if isinstance(x, Real) and x is not True and x is not False else x
                for name, x in result[1].items()
            },
        )
        for name, value in [("", loss), *metrics.items()]:
            if not hasattr(value, "detach") or value.ndim != 0:
                shape = f"tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
                what = f" as metric {name!r}" if name else ""
                raise ValueError(f"loss {self.name!r} returned a {shape}{what}; it must be a scalar sum")
        if scores.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"loss {self.name!r} does not depend on the scores; return (0 * scores).sum() where it is 0"
            )
        return loss, metrics

    def _check_sum(
        self, function: LossFunction, loss: Tensor, scores: Tensor, entropy: Tensor | None, inputs: LossInputs
    ) -> None:
        """Raises ValueError if the loss of the first micro-batch of several datums is not the sum of its halves'."""
        can_be_kept = isinstance(self.function, Hashable)
        if self.checks_values or inputs.num_datums < 2 or (can_be_kept and self.function in _summed):
            return
        whole, parts = float(loss.detach()), list[float]()
        is_first = inputs.datum_index * 2 < inputs.num_datums
        if bool(is_first.all()) or not bool(is_first.any()):  # a half has no scored position
            return
        for chosen in (is_first, ~is_first):
            rows = chosen.nonzero().squeeze(1)
            given = None if entropy is None else entropy[rows].detach()
            parts.append(float(function(scores[rows].detach(), given, inputs.of(rows))[0]))
        if abs(sum(parts) - whole) > _SUM_TOLERANCE * sum(map(abs, parts)):
            raise ValueError(
                f"loss {self.name!r} of a micro-batch is {whole:.6g}, and of its halves {parts[0]:.6g} and "
                f"{parts[1]:.6g}; it must be a sum over tokens, which grad_scale of optim_step divides"
            )
        if can_be_kept and any(parts):
            _summed.add(self.function)

    def check_inputs(self, given: Collection[str]) -> None:
        """Raises ValueError if the loss needs an input that is not among those given, saying which option asks for it.

        `given` are the names in a datum's `loss_inputs`, or the names that a loop will put there.
        """
        missing = [name for name in self.required_inputs if name not in given]
        if missing:
            raise ValueError(
                f"loss {self.name!r} needs the input {missing[0]!r}{_NEEDED_FOR.get(missing[0], '')}; there are "
                f"{', '.join(sorted(given))}"
            )

    def prepared(self, batch: Sequence[Datum]) -> Sequence[Datum]:
        """The batch with the inputs that the loss derives from the whole of it; most losses derive none."""
        if self.shared.observation_coef > 0:
            batch = with_observations(batch)
        if self.prepare is None or not batch:
            return batch
        return self.prepare(batch, {**option_defaults(self.function), **self.options})

    def check_head(self, head: Head) -> None:
        """Raises ValueError if the loss needs another head."""
        if self.head not in (None, head):
            raise ValueError(
                f"loss is {self.name!r}, which needs a trainer with head={self.head!r}; this trainer has head={head!r}"
            )

    def with_options(self, config: Mapping[str, object]) -> Loss:
        """The same loss with these options set. Raises ValueError for an unknown name or a value out of range."""
        own = option_defaults(self.function)
        shared = {name: value for name, value in asdict(self.shared).items() if name in self.takes}
        for name, value in config.items():
            if name not in own and name not in shared:
                known = (*own, *shared)
                raise ValueError(
                    f"loss_config has {name!r}, which {self.name!r} does not know{did_you_mean(name, known)}"
                )
            if not self.checks_values:
                _check_type(self, name, value)
            else:
                kind = _SHARED_KINDS[name] if name in shared else str if isinstance(own[name], str) else NotNegative
                check_value(f"loss_config[{name!r}]", value, kind)
        options = {**self.options, **{name: value for name, value in config.items() if name in own}}
        if missing := [name for name, default in own.items() if default is _REQUIRED and name not in options]:
            raise ValueError(f"loss_config lacks {missing[0]!r}, which {self.name!r} needs")
        changed = replace(self.shared, **{name: value for name, value in config.items() if name in shared})
        if self.checks_values:
            _check_thresholds({**own, **options})
        old_logprobs = ("old_logprobs",) if self.clips and changed.importance_cap > 0 else ()
        return replace(
            self,
            required_inputs=tuple(dict.fromkeys((*self.required_inputs, *changed.required_inputs, *old_logprobs))),
            needs_entropy=self.needs_entropy or changed.needs_entropy,
            options=options,
            shared=changed,
        )


_SUM_TOLERANCE = 0.01
_summed: WeakSet[LossFunction] = WeakSet()
"""Functions of users that were seen to be sums."""

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", function=cross_entropy),
        Loss(name="importance_sampling", function=importance_sampling, required_inputs=_INPUTS, takes=_OPTIONS),
        Loss(name="ppo", function=ppo, required_inputs=_INPUTS, takes=_OPTIONS, clips=True),
        Loss(name="cispo", function=cispo, required_inputs=_INPUTS, takes=_OPTIONS, clips=True),
        # DRO has no importance ratio that a correction could change.
        Loss(name="dro", function=dro, required_inputs=_INPUTS, takes=(*KL_OPTIONS, *TERM_OPTIONS)),
        Loss(
            name="gspo",
            function=gspo,
            normaliser="sequences",
            required_inputs=_INPUTS,
            takes=_OPTIONS,
            clips=True,
        ),
        Loss(name="value", function=value_loss, required_inputs=("old_values", "returns"), head="value"),
    )
}


def all_losses() -> dict[str, Loss]:
    """All losses by name: `LOSSES`, and the tables of installed plug-ins."""
    tables = [part.losses for part in load_all("algorithms", Algorithms).values()]
    return {name: loss for table in (*tables, LOSSES) for name, loss in table.items()}


def get_loss(loss: str | Callable[..., Any] | Loss, config: Mapping[str, object] | None = None) -> Loss:
    """A loss with its options set. `loss` is a name ("ppo"), an import path ("module:function") or a function.

    Raises ValueError for an unknown name or option, naming the nearest known one, and for a bad value of an option.
    """
    if isinstance(loss, Loss):
        found = loss
    elif isinstance(loss, str) and ":" not in loss:
        known = LOSSES if loss in LOSSES else all_losses()
        check_known("loss", loss, known, "losses")
        found = known[loss]
    else:
        found = custom_loss(loss)
    if not isinstance(config or {}, Mapping):
        raise ValueError(f"loss_config is {config!r}; it must be a mapping from names of options to values")
    return found.with_options({str(name): value for name, value in (config or {}).items()})


def custom_loss(function: str | LossFunction) -> Loss:
    """A user's loss: `"module:function"`, or a function of `(logprobs, entropy, inputs) -> (loss_sum, metrics)`.

    The trainer always computes the entropy for it. With a value head, it is given values instead of log-probs, and None
    as entropy. Which inputs it needs is not declared: a missing one raises KeyError when the function asks for it.
    """
    if isinstance(function, str):
        function = named_function("loss", function)
    if not callable(function):
        raise ValueError(f"loss is {function!r}; it must be a name, 'module:function' or a function")
    name = getattr(function, "__name__", type(function).__name__)
    return Loss(name=name, function=function, head=None, needs_entropy=True, checks_values=False)


def option_defaults(function: Callable[..., object]) -> dict[str, object]:
    """The options of a loss function, which are its keyword-only parameters, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def token_mean(batch: Sequence[Datum]) -> float:
    """1 / (number of scored tokens): every token of a step counts the same, so long completions count for more.

    DAPO, section 3.3 of https://arxiv.org/abs/2503.14476. Raises ValueError if the batch has no scored token.
    """
    num_tokens = sum(datum.num_loss_tokens for datum in batch)
    if num_tokens == 0:
        raise ValueError("token_mean was given a batch without a scored token; there is nothing to average over")
    return 1 / num_tokens


def constant_length(num_sequences: int, max_tokens: int) -> float:
    """1 / (num_sequences * max_tokens), a constant.

    So the weight of a token does not depend on the length of its completion, nor on that of any other: Dr. GRPO,
    https://arxiv.org/abs/2503.20783.
    """
    check_at_least(1, num_sequences=num_sequences, max_tokens=max_tokens)
    return 1 / (num_sequences * max_tokens)


def sequence_mean(batch: Sequence[Datum]) -> tuple[list[Datum], float]:
    """The batch with each datum's weights divided by its number of scored tokens, and 1 / (number of datums).

    Every completion of a step counts the same, so a token of a long one counts for less: GRPO as published, eq. 3 of
    https://arxiv.org/abs/2402.03300. Datums without scored tokens are counted. Raises ValueError for an empty batch.
    """
    if len(batch) == 0:
        raise ValueError("sequence_mean was given an empty batch; there is nothing to average over")
    return sequences_alike(batch, 1.0), 1 / len(batch)


def sequences_alike(batch: Sequence[Datum], length: float) -> list[Datum]:
    """The batch with each datum's weights multiplied by `length` / (its number of scored tokens).

    The sum is then that of sequences which all have `length` tokens, so every one of them counts the same.
    """
    return [datum.weighted(length / max(datum.num_loss_tokens, 1)) for datum in batch]


def _check_type(loss: Loss, name: str, value: object) -> None:
    """Raises ValueError unless the value is of the type that the user's function declares, or of its default's."""
    try:
        hint: object = get_type_hints(loss.function).get(name, _REQUIRED)
    except Exception:  # names that exist for type checkers alone
        hint = _REQUIRED
    default = option_defaults(loss.function)[name]
    if hint is _REQUIRED and type(default) in (bool, int, float, str):
        hint = float if type(default) is int else type(default)  # 2 may stand for 2.0
    if hint is not _REQUIRED:
        check_value(f"loss_config[{name!r}]", value, hint)


def _check_thresholds(options: Mapping[str, Any]) -> None:
    """Raises ValueError if the clip thresholds are in the wrong order, or a temperature is 0."""
    for name, value in options.items():
        if name.endswith("_temperature") and value == 0:
            raise ValueError(f"loss_config[{name!r}] is {value}; it must be above 0")
    low, high = options.get("clip_low_threshold"), options.get("clip_high_threshold")
    dual = options.get("dual_clip_threshold", 0)
    if low is not None and high is not None and low > high:
        raise ValueError(f"loss_config['clip_low_threshold'] is {low}; it must not exceed clip_high_threshold {high}")
    if high is not None and 0 < dual < high:
        raise ValueError(
            f"loss_config['dual_clip_threshold'] is {dual}; it must be 0 (off) or at least clip_high_threshold {high}"
        )
