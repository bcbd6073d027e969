"""Tiny random checkpoints of the core's architectures: what tests of `fsdp2` show of one, they show of all."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rl.system.decoders import DENSE
from rl.tiny_models import SERVABLE, tiny_dense

_LONG: Mapping[str, Any] = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(12)],
        "long_factor": [2.0 + 0.5 * i for i in range(12)],
        "original_max_position_embeddings": 128,
    },
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    **{row.name: (row.architecture, partial(tiny_dense, row.name, **SERVABLE)) for row in DENSE},
    "mistral": ("MistralForCausalLM", partial(tiny_dense, "mistral", **SERVABLE, sliding_window=8)),
    "exaone4-32b": ("Exaone4ForCausalLM", partial(tiny_dense, "exaone4", **SERVABLE, **_WINDOWS)),
    "phi4-mini": ("Phi3ForCausalLM", partial(tiny_dense, "phi3", **SERVABLE, **_LONG)),
}
"""Name -> the architecture, and a function that writes a float32 checkpoint with heads that vLLM's CPU kernels know."""
