"""A loss that a client sends as a traced graph: it is data, and is computed from a list of allowed operations.

The Tinker SDK traces a function of one datum by torch.fx and sends the nodes (`tinker.types.CustomLossGraph`):

    def loss(logprobs, advantages):                      logprobs    placeholder
        ratio = torch.exp(logprobs)             ->       exp         call_function  torch.exp     [{"ref": "logprobs"}]
        return -(ratio * advantages).sum(), {}           ...         output         [loss, {metric: value}]

Nothing is unpickled, imported or evaluated: a node names an operation of the tables below, and its arguments are
numbers, a few words and earlier nodes. `TracedLoss.check` computes the shapes before any memory is taken, and bounds
them.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.losses.shared import LossInputs, Metrics

PREFIX = "custom/"
"""Of the loss inputs' names, so that one that a client calls `weights` is not the trainer's."""
MAX_NODES = 1000
MAX_GROWTH = 64
"""Most numbers of an intermediate tensor for each token of the datum, of which `_SPARE` more count."""
_SPARE = 1024
_ELEMENTWISE = """
    abs add asin atan atan2 ceil clamp clip cos div eq erf exp expm1 floor fmod ge greater gt isfinite isinf isnan le
    less lerp log log1p log2 logaddexp logical_and logical_not logical_or logit lt masked_fill maximum minimum mul
    multiply ne neg nan_to_num pow reciprocal relu remainder round rsqrt sigmoid sign sin sqrt square sub tan tanh
    true_divide where xlogy
"""
_WHOLE = """
    all amax amin any argmax argmin argsort cumprod cumsum diff dot flip gather log_softmax logcumsumexp logsumexp max
    mean median min norm numel prod roll softmax sort squeeze std sum topk transpose unsqueeze var
"""
_METHODS = frozenset(
    f"""{_ELEMENTWISE} {_WHOLE} bool contiguous detach dim double expand_as flatten float int long new_ones new_zeros
    reshape size t to type_as view""".split()
)
_WORDS = frozenset({"none", "mean", "sum", "floor", "trunc", "tanh"})
"""Texts that operations take as arguments."""
_FUNCTIONAL = (
    "gelu huber_loss l1_loss log_softmax logsigmoid mse_loss relu sigmoid silu smooth_l1_loss softmax softplus"
)
_ARITHMETIC = "abs add and_ eq floordiv ge gt inv invert le lt mod mul ne neg or_ pos pow sub truediv xor"
_ATTRIBUTES = frozenset({"device", "dtype", "ndim", "shape"})
_FLOATS = {name: float(name) for name in ("inf", "-inf", "nan")}
_DTYPES = {name: getattr(torch, name) for name in ("bool", "float32", "float64", "int32", "int64")}


def _arithmetic(name: str) -> Callable[..., object]:
    """Python's operator for tensors and numbers. Powers need a tensor: of large integers they never end."""
    function = getattr(operator, name)

    def apply(*operands: object) -> object:
        if not all(isinstance(each, Tensor | bool | int | float) for each in operands):
            raise ValueError("its operands must be tensors and numbers")
        if name == "pow" and not any(isinstance(each, Tensor) for each in operands):
            raise ValueError("a power needs a tensor")
        return function(*operands)

    return apply


def _attribute(value: object, name: Any) -> object:
    if not isinstance(value, Tensor) or name not in _ATTRIBUTES:
        raise ValueError(f"{name!r} is no attribute that it may read; these are {', '.join(sorted(_ATTRIBUTES))}")
    return getattr(value, name)


_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{
        f"torch.{name}": getattr(torch, name)
        for name in f"{_ELEMENTWISE} {_WHOLE} cat ones_like stack zeros_like".split()
    },
    **{f"torch.nn.functional.{name}": getattr(torch.nn.functional, name) for name in _FUNCTIONAL.split()},
    **{f"operator.{name}": _arithmetic(name) for name in _ARITHMETIC.split()},
    **{f"math.{name}": getattr(math, name) for name in ("exp", "log", "sqrt")},
    "operator.getitem": operator.getitem,
    "getattr": _attribute,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. Arguments are encoded as in `tinker.types.CustomLossNode`."""

    op: str
    name: str
    target: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss function for `rl.losses.Loss`: the sum of the graph's loss over the datums of a micro-batch."""

    name: str
    inputs: tuple[str, ...]
    """The inputs after the log-probs, in the graph's order, without `PREFIX`."""
    scalars: frozenset[str]
    """The inputs that are one number of a datum, which its array repeats."""
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for a graph that has an operation outside the list, or a form other than a trace's."""
        if not 1 <= len(self.nodes) <= MAX_NODES:
            raise ValueError(f"loss {self.name!r} has {len(self.nodes)} nodes; it may have from 1 to {MAX_NODES}")
        placeholders = [node.target for node in self.nodes if node.op == "placeholder"]
        if placeholders != ["logprobs", *self.inputs]:
            raise ValueError(f"loss {self.name!r} reads {placeholders}; it declares {['logprobs', *self.inputs]}")
        if [node.op for node in self.nodes].count("output") != 1 or self.nodes[-1].op != "output":
            raise ValueError(f"loss {self.name!r} must end with its only output")
        for node in self.nodes:
            known = {"call_function": _FUNCTIONS, "call_method": _METHODS, "placeholder": (node.target,)}
            if node.op != "output" and node.target not in known.get(node.op, ()):
                raise ValueError(f"loss {self.name!r} uses {node.op} {node.target!r}, which this server does not run")

    def check(self, dtypes: Sequence[torch.dtype], num_tokens: int) -> None:
        """Computes the shapes for a datum of so many tokens.

        `dtypes` are the inputs'. Raises ValueError if an operation fails or makes a tensor that is too large,
        and if the loss or a metric is no scalar tensor.
        """
        given = [torch.empty(num_tokens, device="meta")]
        for name, dtype in zip(self.inputs, dtypes, strict=True):
            given.append(torch.empty(() if name in self.scalars else num_tokens, dtype=dtype, device="meta"))
        loss, metrics = self._run(given, MAX_GROWTH * (num_tokens + _SPARE))
        for what, value in (("its loss", loss), *((f"metric {key!r}", value) for key, value in metrics.items())):
            if not isinstance(value, Tensor) or value.ndim != 0:
                raise ValueError(f"loss {self.name!r}: {what} must be a tensor of one number, of shape []")

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss and the metrics, each a sum over the datums."""
        del entropy
        total = logprobs[:0].sum()  # 0 with a gradient of 0, for a loss that does not depend on the log-probs
        sums: Metrics = {}
        for datum in range(inputs.num_datums):
            rows = (inputs.datum_index == datum).nonzero().squeeze(1)
            if not len(rows):
                continue
            arrays = [inputs[f"{PREFIX}{name}"][rows] for name in self.inputs]
            arrays = [a[0] if name in self.scalars else a for name, a in zip(self.inputs, arrays, strict=True)]
            loss, metrics = self._run([logprobs[rows], *arrays], None)
            total = total + loss
            for key, value in metrics.items():
                sums[key] = sums.get(key, torch.zeros((), device=logprobs.device)) + value.detach().float()
        return total, sums

    def _run(self, given: Sequence[Tensor], max_numbers: int | None) -> tuple[Any, Mapping[str, Any]]:
        values: dict[str, Any] = {}
        remaining = iter(given)
        for node in self.nodes:
            try:
                values[node.name] = self._value(node, values, remaining, given[0].device)
                if max_numbers is not None:
                    _check_size(values[node.name], max_numbers)
            except Exception as error:
                raise ValueError(f"loss {self.name!r}: {node.target} ({node.name}) failed: {error}") from error
        loss, metrics = values[self.nodes[-1].name]
        return loss, metrics

    def _value(self, node: Node, values: Mapping[str, Any], remaining: Any, device: torch.device) -> Any:
        if node.op == "placeholder":
            return next(remaining)
        args = [_decoded(arg, values, device) for arg in node.args]
        kwargs = {key: _decoded(arg, values, device) for key, arg in node.kwargs.items()}
        if node.op == "call_function":
            return _FUNCTIONS[node.target](*args, **kwargs)
        if node.op == "call_method":
            if not isinstance(args[0], Tensor):
                raise ValueError("it is a method of tensors")
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        (output,) = args
        if not isinstance(output, tuple | list) or len(output) != 2 or not isinstance(output[1], dict):
            raise ValueError("it must return a loss and a dictionary of metrics")
        return output


def _decoded(arg: object, values: Mapping[str, object], device: torch.device) -> object:
    """An argument as Python has it. Raises ValueError for anything else than the format has."""
    if arg is None or isinstance(arg, bool | int | float) or (isinstance(arg, str) and arg in _WORDS | _ATTRIBUTES):
        return arg
    if isinstance(arg, list):
        return [_decoded(each, values, device) for each in arg]
    if isinstance(arg, dict) and len(arg) == 1:
        ((kind, content),) = arg.items()
        if kind in ("tuple", "slice") and isinstance(content, list):
            return {"tuple": tuple, "slice": _slice}[kind](_decoded(each, values, device) for each in content)
        if kind == "dict" and isinstance(content, dict):
            return {key: _decoded(each, values, device) for key, each in content.items()}
        tables: dict[str, Mapping[Any, object]] = {"ref": values, "dtype": _DTYPES, "float": _FLOATS}
        if kind in tables and isinstance(content, str) and content in tables[kind]:
            return tables[kind][content]
        if kind in ("ellipsis", "device"):
            return ... if kind == "ellipsis" else device  # an operation computes where the datum is
    raise ValueError(f"{arg!r:.80} is no argument that this server takes")


def _slice(parts: Iterable[object]) -> slice:
    return slice(*parts)


def _check_size(value: object, max_numbers: int) -> None:
    """Raises ValueError for a tensor of more numbers, and for an integer beyond 64 bits."""
    for each in value if isinstance(value, tuple | list) else [value]:
        if isinstance(each, Tensor) and each.numel() > max_numbers:
            raise ValueError(f"it makes a tensor of {each.numel()} numbers; at most {max_numbers} fit")
        if isinstance(each, int) and each.bit_length() > 63:
            raise ValueError("it makes an integer of more than 64 bits")
