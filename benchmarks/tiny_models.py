"""Hugging Face model directories with random weights, small enough that a test builds one in a fraction of a second."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 64


def tiny_llama(
    path: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, num_kv_heads: int = 2, **options: Any
) -> Path:
    """A Llama of two layers, four heads and 64 tokens; `options` go to `LlamaConfig`."""
    config = LlamaConfig(tie_word_embeddings=tied, num_key_value_heads=num_kv_heads, **{**_shape(), **options})
    return _save(LlamaForCausalLM, config, path, dtype)


def tiny_critic(path: Path) -> Path:
    """The same Llama with one random value per position in the place of its output projection."""
    options: dict[str, Any] = {**_shape(), "num_labels": 1}
    config = LlamaConfig(tie_word_embeddings=False, num_key_value_heads=2, **options)
    return _save(LlamaForSequenceClassification, config, path, torch.float32)


def tiny_qwen3(path: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A Qwen3 of the same shape, whose head size is not dim / heads."""
    options = {**_shape(), "head_dim": 16, **options}
    config = Qwen3Config(tie_word_embeddings=tied, num_key_value_heads=2, **options)
    return _save(Qwen3ForCausalLM, config, path, dtype)


def tiny_qwen3_moe(path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A Qwen3 of the same shape with four experts per layer, two per token."""
    options = {
        **_shape(),
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **options,
    }
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig(num_key_value_heads=2, **options), path, dtype)


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # large enough that a mistake anywhere changes the logits
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,  # transformers gives the embedding of a padding token no gradient
    }


def _save(model_class: Any, config: Any, path: Path, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones by default, which would hide a swapped norm
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(dtype).save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0").save_pretrained(path)
    return path
