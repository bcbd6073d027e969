"""The MindSpore process: parameters, gradient and AdamW of one model.

The engine starts it as `python -m examples.engines.mindspore_engine.child_main` in MindSpore's own environment.
"""

from collections.abc import Callable
from typing import Any

import mindspore  # pyright: ignore[reportMissingImports]
import numpy as np
from mindspore import Parameter, Tensor, ops  # pyright: ignore[reportMissingImports]

from examples.engines.mindspore_engine.child import serve
from examples.engines.mindspore_engine.decoder import hidden_states, logprobs_and_entropy, values
from examples.engines.mindspore_engine.messages import AdamStep, Floats, Moments, Row, Shape

_VALUE_HEAD = "score.weight"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class Model:
    """A decoder's parameters and what trains them, by Hugging Face name."""

    def __init__(self) -> None:
        """Holds no parameter yet."""
        self._shape: Shape | None = None
        self._weights: dict[str, Parameter] = {}
        self._gradient: dict[str, Tensor] = {}
        self._of_call: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._pull: Callable[..., Any] | None = None

    def set_shape(self, shape: Shape) -> None:
        """Is called once, before parameters are set."""
        self._shape = shape

    def set_parameter(self, name: str, array: Floats) -> None:
        """Replaces a parameter."""
        self._weights[name] = Parameter(Tensor(array), name=name)

    def parameter(self, name: str) -> Floats:
        """A parameter's values."""
        return self._weights[name].asnumpy()

    def gradient(self, name: str) -> Floats | None:
        """The accumulated gradient of a parameter, if there is one."""
        return self._gradient[name].asnumpy() if self._gradient else None

    def set_moments(self, name: str, moments: Moments) -> None:
        """Replaces the optimizer's state of a parameter."""
        self._moments[name] = (moments.step, Tensor(moments.mean), Tensor(moments.square))

    def moments(self, name: str) -> Moments | None:
        """The optimizer's state of a parameter, if it has stepped."""
        if name not in self._moments:
            return None
        step, mean, square = self._moments[name]
        return Moments(step=step, mean=mean.asnumpy(), square=square.asnumpy())

    def reset_optimizer(self) -> None:
        """Drops the optimizer's state."""
        self._moments = {}

    def begin_call(self) -> None:
        """Drops what a call that failed has left."""
        self._of_call, self._pull = {}, None

    def score(self, row: Row, backward: bool) -> tuple[Floats, Floats | None]:
        """Log-probs [P] and entropies [P] of a row, or values [P] and None. With `backward`, `pull_back` may follow."""
        arrays = (row.tokens, row.cos, row.sin, row.mask, row.scored, row.targets, row.scale, row.cut)
        inputs = [Tensor(array) for array in arrays]
        if backward:
            scores, self._pull = mindspore.vjp(self._forward, *inputs, weights=list(self._weights.values()))
        else:
            scores = self._forward(*inputs)
        entropy = None if _VALUE_HEAD in self._weights else scores[1].asnumpy()
        return scores[0].asnumpy(), entropy

    def pull_back(self, scores: Floats, entropy: Floats | None) -> None:
        """Adds to the call's gradient that of the loss, given its gradient with respect to what `score` returned."""
        assert self._pull is not None
        sensitivities = (Tensor(scores), Tensor(np.zeros_like(scores) if entropy is None else entropy))
        _, gradients = self._pull(*sensitivities)
        self._pull = None
        for name, gradient in zip(self._weights, gradients, strict=True):
            self._of_call[name] = self._of_call[name] + gradient if name in self._of_call else gradient

    def end_call(self) -> bool:
        """Adds the call's gradient to the accumulated one. Returns whether there is any.

        A call that pulled nothing back has a gradient of zeros.
        """
        if not self._of_call:
            self._of_call = {name: ops.zeros_like(weight) for name, weight in self._weights.items()}
        for name, gradient in self._of_call.items():
            self._gradient[name] = self._gradient[name] + gradient if name in self._gradient else gradient
        self.begin_call()
        return bool(self._gradient)

    def clear_gradient(self) -> None:
        """Drops the accumulated gradient."""
        self._gradient = {}

    def gradient_norm(self) -> float:
        """Norm of the accumulated gradient, summed in float64."""
        squares = [np.square(gradient.asnumpy(), dtype=np.float64).sum() for gradient in self._gradient.values()]
        return float(np.sqrt(sum(squares)))

    def adam_step(self, step: AdamStep) -> None:
        """Applies the accumulated gradient, and leaves it."""
        for name, accumulated in self._gradient.items():
            weight, rate, gradient = self._weights[name], step.learning_rates[name], accumulated * step.factor
            before, mean, square = self._moments.get(name, (0, 0.0, 0.0))
            count = before + 1
            mean = step.beta1 * mean + (1 - step.beta1) * gradient
            square = step.beta2 * square + (1 - step.beta2) * gradient * gradient
            unbiased = ops.sqrt(square) / (1 - step.beta2**count) ** 0.5 + step.eps
            decayed = weight * (1 - rate * step.weight_decay)
            weight.set_data(decayed - rate / (1 - step.beta1**count) * mean / unbiased)
            self._moments[name] = (count, mean, square)

    def _forward(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        scored: Tensor,
        targets: Tensor,
        *distribution: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert self._shape is not None
        hidden = ops.gather(hidden_states(self._weights, self._shape, tokens, cos, sin, mask), scored, 0)
        if _VALUE_HEAD in self._weights:
            scores = values(hidden, self._weights[_VALUE_HEAD])
            return scores, ops.zeros_like(scores)
        output = self._weights[_OUTPUT if _OUTPUT in self._weights else _EMBEDDING]  # the embedding if they are tied
        return logprobs_and_entropy(hidden, output, targets, *distribution)


def main() -> None:
    """Serves one model."""
    mindspore.set_device("CPU")
    # Otherwise each operation is handed on through three threads that spin while they wait, for ten times the CPU time.
    mindspore.runtime.launch_blocking()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)  # the lengths of rows vary, so compiled graphs would not last
    model = Model()
    serve(
        {
            function.__name__: function
            for function in (
                model.set_shape,
                model.set_parameter,
                model.parameter,
                model.gradient,
                model.set_moments,
                model.moments,
                model.reset_optimizer,
                model.begin_call,
                model.score,
                model.pull_back,
                model.end_call,
                model.clear_gradient,
                model.gradient_norm,
                model.adam_step,
            )
        }
    )


if __name__ == "__main__":
    main()
