"""Tiny random checkpoints of the plug-in's families, beside the core's in `tests/architectures.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ownloop_families.tiny_families import TINY_FAMILIES
from rl.tiny_models import SERVABLE, tiny_qwen3_moe

_ARCHITECTURES = {
    "gemma4": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
MODELS: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", lambda path: tiny_qwen3_moe(path, **SERVABLE, moe_intermediate_size=64)),
    **{name: (_ARCHITECTURES[name], make) for name, make in TINY_FAMILIES.items()},
}
"""Name -> the architecture, and a function that writes a float32 checkpoint with heads that vLLM's CPU kernels know."""
