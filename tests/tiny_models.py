"""Small models with random weights in Hugging Face form, with a byte-level tokenizer, made in milliseconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM

END_TOKEN = 256
VOCAB_SIZE = 288


def tiny_llama(path: Path, *, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A 2-layer Llama with 4 heads and 2 key-value heads of 32 dimensions, saved under `path`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=None,
        initializer_range=0.1,  # large enough for distributions that are far from uniform
    )
    return _save(LlamaForCausalLM(config), dtype, path)


def tiny_qwen3(path: Path, *, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A 2-layer Qwen3 with 4 heads and 2 key-value heads of 32 dimensions, saved under `path`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=None,
        initializer_range=0.1,
    )
    return _save(Qwen3ForCausalLM(config), dtype, path)


def _save(model: PreTrainedModel, dtype: torch.dtype, path: Path) -> Path:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, in the order of GPT-2's byte alphabet, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | {"<end>": END_TOKEN}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
