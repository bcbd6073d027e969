"""Tiny random checkpoints of the core's architectures: what tests of `fsdp2` show of one, they show of all.

Every option that a family has and Llama lacks is set so that leaving it out changes the logits: Granite's multipliers,
Gemma's sliding windows, windows shorter than the tests' sequences.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from rl.tiny_models import (
    SERVABLE,
    TINY_SHAPE,
    save_tiny,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)

SHAPE: dict[str, Any] = {**TINY_SHAPE, **SERVABLE, "num_key_value_heads": 2}
WINDOW = 8


def _gemma3(path: Path) -> Path:
    layers = ["sliding_attention", "full_attention"]
    options: dict[str, Any] = {**SHAPE, "sliding_window": WINDOW, "layer_types": layers, "query_pre_attn_scalar": 24}
    return save_tiny(Gemma3ForCausalLM, Gemma3TextConfig(tie_word_embeddings=True, **options), path)


def _gemma2(path: Path) -> Path:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    options: dict[str, Any] = {**SHAPE, **caps, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
    return save_tiny(Gemma2ForCausalLM, Gemma2Config(tie_word_embeddings=True, **options), path)


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


def _olmo3(path: Path) -> Path:
    layers = ["sliding_attention", "full_attention"]
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    config = Olmo3Config(tie_word_embeddings=False, sliding_window=WINDOW, layer_types=layers, **shape)
    return save_tiny(Olmo3ForCausalLM, config, path)


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


def _seed_oss(path: Path) -> Path:
    biases: dict[str, Any] = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    return save_tiny(SeedOssForCausalLM, SeedOssConfig(tie_word_embeddings=False, **SHAPE, **biases), path)


def _smollm3(path: Path) -> Path:
    # The second layer has no rotary embeddings.
    config = SmolLM3Config(tie_word_embeddings=True, no_rope_layers=[1, 0], **SHAPE)
    return save_tiny(SmolLM3ForCausalLM, config, path)


MODELS: Mapping[str, tuple[str, Callable[[Path], Path]]] = {
    "llama": ("LlamaForCausalLM", lambda path: tiny_llama(path, **SERVABLE)),
    "mistral": ("MistralForCausalLM", lambda path: tiny_mistral(path, **SERVABLE, sliding_window=WINDOW)),
    "qwen2": ("Qwen2ForCausalLM", lambda path: tiny_qwen2(path, **SERVABLE)),
    "qwen3": ("Qwen3ForCausalLM", lambda path: tiny_qwen3(path, **SERVABLE)),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "granite": ("GraniteForCausalLM", _granite),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "olmo3": ("Olmo3ForCausalLM", _olmo3),
    "seed_oss": ("SeedOssForCausalLM", _seed_oss),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "phi3": ("Phi3ForCausalLM", lambda path: _phi3(path, sliding_window=WINDOW)),
    "phi4-mini": ("Phi3ForCausalLM", _phi4_mini),
}
"""Name -> the architecture, and a function that writes a float32 checkpoint with heads that vLLM's CPU kernels know."""
