"""One rank that computes in MindSpore, in a process and a Python environment of its own.

MindSpore wants another NumPy than ownloop, so the two cannot share a process. The MindSpore process holds parameters,
gradient and optimizer state; here are the verbs. A loss is a function of torch tensors. It is evaluated here, on the
log-probs that MindSpore computed; its gradient with respect to them goes back, and MindSpore propagates it to the
parameters. So every loss works, and torch sees numbers per token only.

Deliberately absent: several ranks, dtypes other than float32, adapters, experts; `layout_check.py` refuses them.
"""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.engines.mindspore_engine.arrays import parameter_shapes, row_arrays
from examples.engines.mindspore_engine.layout_check import check_layout
from examples.engines.mindspore_engine.messages import AdamStep, Moments
from examples.engines.mindspore_engine.start import mindspore_python, start_mindspore
from rl.data.packing import ModelFlops, PackedRow, pack_row
from rl.losses import Loss
from rl.system.hf_config import parse_decoder_config, read_config
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch, PeakMemory
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.checkpoint import CheckpointSaver
from trainer.engines.pytorch.engine_state import HOST, PARTS, Offload
from trainer.engines.pytorch.hf_directory import inverse_frequencies, load_hf_weights, write_hf_directory
from trainer.engines.pytorch.row_runner import OutputCollector, loss_inputs, of_positions


class MindSporeEngine(Engine):
    """A dense Llama, Qwen2 or Qwen3 on the CPU, in float32."""

    def __init__(self, config: TrainerConfig) -> None:
        """Raises ValueError for what the engine cannot train and if MindSpore's environment is missing."""
        hf_config = read_config(config.model)
        check_layout(config, hf_config)
        python = mindspore_python()
        decoder = parse_decoder_config(hf_config)
        self._config = config
        self._shapes = parameter_shapes(decoder, config.head)
        self._inverse_frequencies = inverse_frequencies(decoder).numpy()
        self._vocab_size: int = hf_config["vocab_size"]
        parameters = {name: torch.empty(shape) for name, shape in self._shapes.items()}
        load_hf_weights(parameters, config.model)
        self._child = start_mindspore(python, config, decoder)
        self._set_parameters(parameters)
        self._memory = PeakMemory(HOST, children=(self._child.pid,))
        self._flops = ModelFlops.of(config.model, config.head)
        self._model_info = describe_model(config.model, config.head)
        self._offload = Offload(HOST, _never_moves)
        self._saver = CheckpointSaver()
        self._has_gradient = False
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def memory(self) -> PeakMemory:
        return self._memory

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        output = OutputCollector(self._memory, self._config.head, entropy=False, flops=self._flops.training)
        with self._memory.phase("forward_backward"):
            self._child.call("begin_call")
            for row in self._packed(microbatches):
                self._forward_backward_row(row, loss, output)
            result = output.result()
            self._has_gradient = self._child.call("end_call")
        return result

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        output = OutputCollector(self._memory, self._config.head, entropy=entropy)
        with self._memory.phase("forward"):
            for row in self._packed(microbatches):
                if not len(row.scored):
                    output.add(row, None, None, {})
                    continue
                scores, entropies = of_positions(row, *self._score(row, backward=False))
                output.add(row, scores, entropies if entropy else None, {})
            return output.result()

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        if not math.isfinite(grad_scale):
            raise ValueError(f"grad_scale is {grad_scale}; it must be finite")
        if not self._has_gradient:
            raise ValueError("optim_step was called without a gradient; call forward_backward first")
        learning_rates = _learning_rates(list(self._shapes), params)
        with self._memory.phase("optim_step"):
            norm = abs(grad_scale) * self._child.call("gradient_norm")
            skipped = not math.isfinite(norm)
            if not skipped:
                clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
                step = AdamStep(
                    factor=grad_scale * clip,
                    learning_rates=learning_rates,
                    beta1=params.beta1,
                    beta2=params.beta2,
                    eps=params.eps,
                    weight_decay=params.weight_decay,
                )
                self._child.call("adam_step", step)
                self._version += 1
            self.zero_grad()
        return OptimStepOutput(
            policy_version=self._version,
            learning_rate=params.learning_rate,
            grad_norm=norm,
            skipped=skipped,
            metrics=self._memory.take(),
        )

    def zero_grad(self) -> None:
        self._child.call("clear_gradient")
        self._has_gradient = False

    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        chosen = {"model": model, "gradients": gradients, "optimizer": optimizer}
        self._offload.rest([part for part in PARTS if chosen[part]], device)

    def train_mode(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # nothing differs: these models have no dropout

    def eval_mode(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._shapes:
            parameter = torch.from_numpy(self._child.call("parameter", name))
            if self._has_gradient:
                parameter.grad = torch.from_numpy(self._child.call("gradient", name))
            yield name, parameter

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        self._saver.save(
            path,
            self._state(optimizer=True),
            self._info("checkpoint"),
            size_bytes=12 * self._num_parameters,  # parameters and both moments, 4 bytes each
            asynchronous=asynchronous,
            keep_last=keep_last,
        )

    def wait_for_checkpoint(self) -> None:
        self._saver.wait()

    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        self._saver.wait()
        state = self._state(optimizer=not weights_only)
        if weights_only or checkpoint.read_info(path).num_ranks != 1:
            del state["rng"]
        info = checkpoint.load(path, state, self._model_info)
        self._set_parameters(state["model"])
        self._child.call("reset_optimizer")
        for name, moments in state.get("optimizer", {}).items():
            if step := int(moments["step"]):
                self._child.call(
                    "set_moments",
                    name,
                    Moments(step=step, mean=moments["exp_avg"].numpy(), square=moments["exp_avg_sq"].numpy()),
                )
        if "rng" in state:
            torch.set_rng_state(state["rng"]["0"])
        self.zero_grad()
        self._version = 0 if weights_only else info.policy_version
        return self._version

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        checkpoint.with_directory(
            path,
            self._info("export"),
            dtype.itemsize * self._num_parameters,
            lambda partial: write_hf_directory(
                partial, self._config.model, self.hf_parameters(), dtype, self._config.head
            ),
        )

    @property
    def _num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values())

    def _packed(self, microbatches: Sequence[Microbatch]) -> list[PackedRow]:
        return [pack_row(datums, share_prefixes=True) for datums in microbatches if datums]

    def _forward_backward_row(self, row: PackedRow, loss: Loss, output: OutputCollector) -> None:
        if not len(row.scored):
            output.add(row, None, None, {})
            return
        scores, entropy = self._score(row, backward=True)
        scores.requires_grad_()
        entropy = entropy.requires_grad_() if entropy is not None and loss.needs_entropy else None
        of_row = of_positions(row, scores, entropy)
        loss_sum, metrics = loss(*of_row, loss_inputs(row, HOST))
        output.add(row, of_row[0], None, {"loss": loss_sum.detach(), **metrics})
        loss_sum.backward()
        of_scores = torch.zeros_like(scores) if scores.grad is None else scores.grad
        of_entropy = None if entropy is None or entropy.grad is None else entropy.grad.numpy()
        self._child.call("pull_back", of_scores.numpy(), of_entropy)

    def _score(self, row: PackedRow, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies, or values and None, [P] each, of a row with scored pairs."""
        scores, entropy = self._child.call(
            "score", row_arrays(row, self._inverse_frequencies, self._vocab_size), backward
        )
        return torch.from_numpy(scores), None if entropy is None else torch.from_numpy(entropy)

    def _set_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        for name, tensor in parameters.items():
            self._child.call("set_parameter", name, tensor.numpy())

    def _info(self, kind: checkpoint.Kind) -> checkpoint.CheckpointInfo:
        return checkpoint.CheckpointInfo(
            kind=kind, policy_version=self._version, model=self._model_info, num_ranks=self._config.num_ranks
        )

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        """The state in the form and by the names of every other engine, so that its checkpoints load there too."""
        return {
            "model": {name: torch.from_numpy(self._child.call("parameter", name)) for name in self._shapes},
            **({"optimizer": dict(self._optimizer_state())} if optimizer else {}),
            "rng": {"0": torch.get_rng_state()},
        }

    def _optimizer_state(self) -> Generator[tuple[str, dict[str, Tensor]]]:
        for name, shape in self._shapes.items():
            moments: Moments | None = self._child.call("moments", name)
            step, mean, square = (
                (0, torch.zeros(shape), torch.zeros(shape))
                if moments is None
                else (moments.step, torch.from_numpy(moments.mean), torch.from_numpy(moments.square))
            )
            yield name, {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}


def _learning_rates(names: Sequence[str], params: AdamParams) -> dict[str, float]:
    """The learning rate of every parameter. Raises ValueError for a multiplier that matches none."""
    multipliers = params.learning_rate_multipliers
    for pattern in multipliers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"AdamParams.learning_rate_multipliers[{pattern!r}] matches no parameter; names are such as {names[0]}"
            )
    return {
        name: params.learning_rate
        * next((factor for pattern, factor in multipliers.items() if fnmatchcase(name, pattern)), 1.0)
        for name in names
    }


def _never_moves(part: object, device: object) -> None:
    """The engine's device is the host, so `Offload` has nothing to move."""
    raise AssertionError(f"{part} should move to {device}")
