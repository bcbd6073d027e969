"""Tiny random checkpoints of the families: to try an engine, a layout or a loop on each of them within seconds.

Every option that a family has and Llama lacks is set so that leaving it out changes the logits: soft caps, selection
biases, windows of a few tokens. No weight is neutral. vLLM's kernels for CPUs know the sizes of heads.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import transformers

from rl.system.hf_config import ModelFamily
from rl.tiny_models import SERVABLE, TINY_SHAPE, save_tiny

_NEUTRAL = ("gate.weight", "conv1d.weight", "router.weight", "e_score_correction_bias", "sinks")
SHAPE: Mapping[str, Any] = {**TINY_SHAPE, **SERVABLE, "num_key_value_heads": 2}
WINDOW = 8
ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
"""Options of models with sigmoid routing."""


def save_random(path: Path, architecture: str, *, tied: bool = False, **options: object) -> Path:
    """Writes a model of this class of transformers, in which no weight is neutral, and returns its directory.

    Routers with selection biases and scales of layers are random, too.
    """
    model_class: Any = getattr(transformers, architecture)

    def build(config: object) -> object:
        model = model_class(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(_NEUTRAL) or ".experts." in name:
                torch.nn.init.normal_(tensor, std=0.15)
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(tensor, 0.8, 1.2)
        return model

    return save_tiny(build, model_class.config_class(tie_word_embeddings=tied, **options), path)


_ROWS: Mapping[str, ModelFamily] = {
    each.name: each.load()
    for each in sorted(entry_points(group="ownloop.families"))
    if each.value.startswith("ownloop_families.")
}
TINY_FAMILIES: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    name: (row.architectures[0], resolve_name(row.tiny)) for name, row in _ROWS.items()
}
"""Name -> the architecture, and a function that writes a float32 checkpoint to a directory and returns that."""
