"""Directories of models that plans are made for: a config.json, and no weights."""

import json
from pathlib import Path
from typing import Any

from ownloop_plan.sizes import ModelSize
from rl.system.hf_config import parse_decoder_config, read_config

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
QWEN3_5: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 8, "num_key_value_heads": 4},
    "mixture": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_experts": 64,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
    },
}


def write_qwen3(folder: Path, size: str) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **QWEN3[size],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": size == "0.6B",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_qwen3_5(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    moe = "" if kind == "dense" else "Moe"
    config = {
        "architectures": [f"Qwen3_5{moe}ForCausalLM"],
        "model_type": f"qwen3_5{'_moe' if moe else ''}_text",
        **QWEN3_5[kind],
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
        "mamba_ssm_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def size_of(folder: Path) -> ModelSize:
    return ModelSize(parse_decoder_config(read_config(folder)))
