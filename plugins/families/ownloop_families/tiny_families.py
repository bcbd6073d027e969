"""Tiny random checkpoints of families: to try an engine, a layout or a loop on each of them within seconds.

Every option that a family has and Llama lacks is set so that leaving it out changes the logits: soft caps, selection
biases, windows of a few tokens. No weight is neutral. vLLM's kernels for CPUs know the sizes of heads.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from rl.tiny_models import SERVABLE, TINY_SHAPE, VOCAB_SIZE, save_tiny

_NEUTRAL = ("gate.weight", "conv1d.weight", "router.weight", "e_score_correction_bias", "sinks")
SHAPE: dict[str, Any] = {**TINY_SHAPE, **SERVABLE, "num_key_value_heads": 2}
WINDOW = 8
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_DELTA: dict[str, Any] = {
    "head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _random(model_class: Any) -> Callable[[Any], Any]:
    """Builds a model in which no weight is neutral: routers with selection biases and scales of layers are random."""

    def build(config: Any) -> Any:
        model = model_class(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(_NEUTRAL) or ".experts." in name:
                torch.nn.init.normal_(tensor, std=0.15)
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(tensor, 0.8, 1.2)
        return model

    return build


def _gemma4(path: Path) -> Path:
    options: dict[str, Any] = {
        **SHAPE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 64,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    }
    return save_tiny(_random(Gemma4ForCausalLM), Gemma4TextConfig(tie_word_embeddings=True, **options), path)


def _glm4_moe(path: Path) -> Path:
    options: dict[str, Any] = {**SHAPE, **_ROUTED, "use_qk_norm": True, "attention_bias": True}
    return save_tiny(_random(Glm4MoeForCausalLM), Glm4MoeConfig(tie_word_embeddings=False, **options), path)


def _gpt_oss(path: Path) -> Path:
    options: dict[str, Any] = {
        **SHAPE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": WINDOW,
    }
    return save_tiny(_random(GptOssForCausalLM), GptOssConfig(tie_word_embeddings=False, **options), path)


def _qwen3_5(path: Path) -> Path:
    options: dict[str, Any] = {**SHAPE, **_DELTA}
    build = _random(Qwen3_5ForCausalLM)
    return _centred(save_tiny(build, Qwen3_5TextConfig(tie_word_embeddings=False, **options), path))


def _qwen3_5_moe(path: Path) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    options: dict[str, Any] = {**SHAPE, **_DELTA, **experts, "shared_expert_intermediate_size": 64}
    build = _random(Qwen3_5MoeForCausalLM)
    return _spaced(_centred(save_tiny(build, Qwen3_5MoeTextConfig(tie_word_embeddings=False, **options), path)))


def _centred(path: Path) -> Path:
    """Subtracts 1 from the weights of norms that multiply by 1 + weight, so that they multiply by 0.5 to 1.5."""
    file = path / "model.safetensors"
    weights = {n: t - float("norm" in n and "linear_attn.norm" not in n) for n, t in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return path


def _spaced(path: Path) -> Path:
    """Writes a tokenizer of words with a space before them, since transformers loads one class for this model type.

    That class splits a text into bytes, of which the vocabulary has none. So words are added tokens.
    """
    words = [f" w{i}" for i in range(VOCAB_SIZE)]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    special = dict.fromkeys(("eos_token", "unk_token"), words[2])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0], **special).save_pretrained(path)
    return path


def _deepseek_v3(path: Path) -> Path:
    heads = {"kv_lora_rank": 512, "q_lora_rank": 48, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    options: dict[str, Any] = {**SHAPE, **_ROUTED, **heads, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
    options |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which vLLM reads
    del options["head_dim"]
    return save_tiny(_random(DeepseekV3ForCausalLM), DeepseekV3Config(tie_word_embeddings=False, **options), path)


TINY_FAMILIES: Mapping[str, Callable[[Path], Path]] = {
    "gemma4": _gemma4,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gpt_oss": _gpt_oss,
}
"""Name -> a function that writes a float32 checkpoint to a directory and returns that."""
