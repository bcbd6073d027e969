"""Gemma 4 (text), which torchtitan does not build."""

from pathlib import Path

from rl.system.hf_config import ModelFamily

FAMILY = ModelFamily(
    architectures=("Gemma4ForCausalLM",),
    agreed={"hidden_activation": "gelu_pytorch_tanh"},
    tiny="ownloop_families.gemma4:tiny",
)


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from ownloop_families.tiny import SHAPE, WINDOW, save_random

    options: dict[str, object] = {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 64,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    }
    return save_random(path, "Gemma4ForCausalLM", tied=True, **SHAPE, **options)
