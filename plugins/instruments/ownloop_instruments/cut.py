"""A micro-batch from a layer on: the layer's input and the weights behind it, so that a replay needs no model.

What is computed is a model of the layers that are left, as transformers would name it. Its first layer gets the kept
input in place of what its embedding gives.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ownloop_instruments.computation import ROUNDING, Computation, compute
from ownloop_instruments.one_process import lone_engine
from rl.losses import Loss
from rl.system.hf_config import experts_of, read_config
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines.base import Engine

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is left of a model from a layer on."""

    layer: int
    """Its number in the whole model, from 0."""
    config: Mapping[str, Any]
    """The config.json of what is left."""
    hidden: NDArray[np.float32]
    """The layer's input."""
    weights: Mapping[str, NDArray[Any]]
    """Hugging Face name -> values; uint16 are the bits of bfloat16, where that is computed in."""

    def compute(self, trainer: TrainerConfig, data: Sequence[Datum], loss: Loss, *, layers: bool) -> Computation:
        """The forward and backward pass from the layer on. Layers have their numbers in the whole model."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            tensors = {name: _tensor(each) for name, each in self.weights.items()}
            shape = (int(self.config["vocab_size"]), self.hidden.shape[-1])
            save_file({_EMBEDDING: torch.zeros(shape), **tensors}, Path(folder) / "model.safetensors", {"format": "pt"})
            engine = lone_engine(trainer, Path(folder), None)
            with _first_input(0, torch.from_numpy(self.hidden.copy())):
                found = compute(engine, data, loss, layers=layers)
        names = [*found.values]
        inputs = (n for n, name in enumerate(names) if name.startswith("input of ") and _LAYER.search(name))
        computed = names[next(inputs, 0) :]  # what comes before the layer has no meaning
        return replace(found, values={_renumbered(name, self.layer): found.values[name] for name in computed})


def cut_at(
    layer: int, engine: Engine, trainer: TrainerConfig, model: Path, data: Sequence[Datum], loss: Loss
) -> tuple[Cut, Computation]:
    """Keeps what a micro-batch needs from a layer on, and what came of it.

    Raises ValueError for a layer that there is not, for adapters and mixtures, and if the log-probs are others.
    """
    config: dict[str, object] = json.loads((model / "config.json").read_text())
    depth = int(read_config(model).get("num_hidden_layers", 0))
    if not 0 <= layer < depth or "num_hidden_layers" not in config:
        raise ValueError(f"--from-layer is {layer}; the model has layers 0 to {depth - 1}")
    if trainer.lora is not None or experts_of(read_config(model)) is not None:
        raise ValueError("--from-layer is for dense models that are trained whole; make the capsule without it")
    with _first_input(layer) as seen:
        whole = compute(engine, data, loss)
    left = {
        name: each[layer:] if isinstance(each, list) and len(each) == depth else each for name, each in config.items()
    }
    names = {name: _renumbered(name, -layer) for name, _ in engine.hf_parameters() if _number(name) >= layer}
    kept = {names[name]: _array(tensor, trainer) for name, tensor in engine.hf_parameters() if name in names}
    if not config.get("tie_word_embeddings"):
        kept.pop(_EMBEDDING, None)  # it is not read
    cut = Cut(
        layer=layer, config={**left, "num_hidden_layers": depth - layer}, hidden=seen[0].float().numpy(), weights=kept
    )
    found = cut.compute(trainer, data, loss, layers=True)
    apart = max(whole.values[name].difference(found.values[name]) for name in whole.values if "log-probs" in name)
    if apart > ROUNDING[trainer.compute_dtype]:
        raise ValueError(f"the log-probs from layer {layer} on are others than the model's, by {apart:.1e}")
    return cut, found


def _number(name: str) -> float:
    """The layer that a parameter is of; what is of none belongs to all."""
    found = _LAYER.search(name)
    return int(found[1]) if found else float("inf")


def _renumbered(name: str, by: int) -> str:
    return _LAYER.sub(lambda found: f"layers.{int(found[1]) + by}", name)


def _array(tensor: Tensor, trainer: TrainerConfig) -> NDArray[Any]:
    """A parameter as it is computed with."""
    values = tensor.detach().cpu()
    return (
        values.bfloat16().view(torch.uint16).numpy() if trainer.compute_dtype == "bfloat16" else values.float().numpy()
    )


def _tensor(array: NDArray[Any]) -> Tensor:
    values = torch.from_numpy(array.copy())
    return values.view(torch.bfloat16).float() if array.dtype == np.uint16 else values


@contextlib.contextmanager
def _first_input(layer: int, given: Tensor | None = None) -> Generator[list[Tensor]]:
    """Within the block, a layer's first input is noted, or is another one that is given."""
    names: dict[int, str] = {}
    seen: list[Tensor] = []

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if not names:
            names.update({id(part): name for name, part in module.named_modules()})
        if not re.search(rf"\blayers\.{layer}$", names.get(id(module), "")):
            return None
        seen.append(inputs[0].detach().cpu())
        return None if given is None else (given.to(inputs[0].dtype).requires_grad_(), *inputs[1:])

    handle = hooks.register_module_forward_pre_hook(before)
    try:
        yield seen
    finally:
        handle.remove()
