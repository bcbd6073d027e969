"""Tiny random checkpoints of many architectures: what tests of `fsdp2` show of one, they show of all.

Every option that a family has and Llama lacks is set so that leaving it out changes the logits: Granite's multipliers,
Gemma's sliding windows, windows shorter than the tests' sequences.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from ownloop_families.tiny_families import SHAPE, TINY_FAMILIES, WINDOW
from rl.tiny_models import (
    SERVABLE,
    save_tiny,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)


def _gemma3(path: Path) -> Path:
    layers = ["sliding_attention", "full_attention"]
    options: dict[str, Any] = {**SHAPE, "sliding_window": WINDOW, "layer_types": layers, "query_pre_attn_scalar": 24}
    return save_tiny(Gemma3ForCausalLM, Gemma3TextConfig(tie_word_embeddings=True, **options), path)


def _granite(path: Path) -> Path:
    factors: dict[str, Any] = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    }
    return save_tiny(GraniteForCausalLM, GraniteConfig(tie_word_embeddings=True, **SHAPE, **factors), path)


def _olmo2(path: Path) -> Path:
    return save_tiny(Olmo2ForCausalLM, Olmo2Config(tie_word_embeddings=False, **SHAPE), path)


def _phi3(path: Path, **options: Any) -> Path:
    shape: dict[str, Any] = {**SHAPE, **options}
    config = Phi3Config(tie_word_embeddings=False, **shape)
    return save_tiny(Phi3ForCausalLM, config, path)


def _phi4_mini(path: Path) -> Path:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(12)],
        "long_factor": [2.0 + 0.5 * i for i in range(12)],
        "original_max_position_embeddings": 128,
    }
    options: dict[str, Any] = {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_parameters": rope,
    }
    return _phi3(path, **options)


MODELS: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    "llama": ("LlamaForCausalLM", lambda path: tiny_llama(path, **SERVABLE)),
    "mistral": ("MistralForCausalLM", lambda path: tiny_mistral(path, **SERVABLE, sliding_window=WINDOW)),
    "qwen2": ("Qwen2ForCausalLM", lambda path: tiny_qwen2(path, **SERVABLE)),
    "qwen3": ("Qwen3ForCausalLM", lambda path: tiny_qwen3(path, **SERVABLE)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", lambda path: tiny_qwen3_moe(path, **SERVABLE, moe_intermediate_size=64)),
    "gemma2": ("Gemma2ForCausalLM", TINY_FAMILIES["gemma2"]),
    "gemma4": ("Gemma4ForCausalLM", TINY_FAMILIES["gemma4"]),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "glm4_moe": ("Glm4MoeForCausalLM", TINY_FAMILIES["glm4_moe"]),
    "deepseek_v3": ("DeepseekV3ForCausalLM", TINY_FAMILIES["deepseek_v3"]),
    "qwen3_5": ("Qwen3_5ForCausalLM", TINY_FAMILIES["qwen3_5"]),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", TINY_FAMILIES["qwen3_5_moe"]),
    "gpt_oss": ("GptOssForCausalLM", TINY_FAMILIES["gpt_oss"]),
    "granite": ("GraniteForCausalLM", _granite),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "olmo3": ("Olmo3ForCausalLM", TINY_FAMILIES["olmo3"]),
    "seed_oss": ("SeedOssForCausalLM", TINY_FAMILIES["seed_oss"]),
    "smollm3": ("SmolLM3ForCausalLM", TINY_FAMILIES["smollm3"]),
    "phi3": ("Phi3ForCausalLM", lambda path: _phi3(path, sliding_window=WINDOW)),
    "phi4-mini": ("Phi3ForCausalLM", _phi4_mini),
}
"""Name -> the architecture, and a function that writes a float32 checkpoint with heads that vLLM's CPU kernels know."""
