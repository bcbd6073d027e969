"""What a loss is: a pure function of log-probs, by name or by value, checked before any rank computes.

A loss never sees a model, a batch layout or a rank. It returns a sum over tokens, never a mean: who normalises, and by
what, is the controller's choice at `optim_step`. This package does not import torch: the controller, which only checks
names and options, has no use for it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl.checks import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]
LossFunction = Callable[..., tuple["Tensor", Metrics]]
"""(logprobs [S], entropy [S] or None, inputs, *, options) -> (loss sum, metric sums). Options have defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The scored positions of one micro-batch, concatenated over its datums. Legend: S scored positions, D datums."""

    arrays: Mapping[str, Tensor]
    """Name -> [S]. Always holds `weights` and `target_tokens`."""
    datum_index: Tensor
    """[S] int64, which datum of the micro-batch a position belongs to, in 0..D-1."""
    num_datums: int
    """D."""

    def __getitem__(self, name: str) -> Tensor:
        """[S] the array of that name."""
        return self.arrays[name]

    @property
    def weights(self) -> Tensor:
        """[S] what each position's term is multiplied by; never 0."""
        return self.arrays["weights"]

    def mean_per_datum(self, values: Tensor) -> Tensor:
        """[D] mean of `values` [S] over each datum's scored positions; 0 for a datum without any."""
        sums = values.new_zeros(self.num_datums).index_add(0, self.datum_index, values)
        counts = values.new_zeros(self.num_datums).index_add(0, self.datum_index, values.new_ones(len(values)))
        return sums / counts.clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss function with its options and what it needs."""

    name: str
    function: LossFunction
    required_inputs: tuple[str, ...] = ()
    """Names beyond `target_tokens` that every datum's `loss_inputs` must hold."""
    needs_entropy: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Evaluates the loss on one micro-batch. Metrics come back detached."""
        loss, metrics = self.function(logprobs, entropy, inputs, **self.options)
        if loss.ndim != 0:
            raise ValueError(
                f"loss {self.name!r} returned a tensor of shape {tuple(loss.shape)}; it must be a scalar sum"
            )
        return loss, {name: value.detach() for name, value in metrics.items()}

    def with_options(self, config: Mapping[str, Any]) -> Loss:
        """The same loss with some options set. Raises ValueError for an unknown name or a value out of range."""
        known = option_defaults(self.function)
        for name, value in config.items():
            if name not in known:
                raise ValueError(
                    f"loss_config has {name!r}, which {self.name!r} does not know{did_you_mean(name, known)}"
                )
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"loss_config[{name!r}] is {value}; {self.name!r} needs it finite and at least 0")
        merged = {**known, **config}
        low, high = merged.get("clip_low_threshold"), merged.get("clip_high_threshold")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"loss_config['clip_low_threshold'] is {low}; it must not exceed clip_high_threshold {high}"
            )
        return Loss(
            name=self.name,
            function=self.function,
            required_inputs=self.required_inputs,
            needs_entropy=self.needs_entropy,
            options=dict(config),
        )


def option_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a loss function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def custom_loss(function: str | LossFunction) -> Loss:
    """A user's loss: `"module:function"`, or a function of `(logprobs, entropy, inputs) -> (loss_sum, metrics)`.

    It is given the entropy and must name the inputs it needs itself by using them.
    """
    if isinstance(function, str):
        module_name, _, attribute = function.partition(":")
        try:
            function = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"loss {module_name}:{attribute} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"loss is {function!r}; it must be a name, 'module:function' or a function")
    name = getattr(function, "__name__", type(function).__name__)
    return Loss(name=name, function=function, needs_entropy=True)
