"""Tiny models with random weights, and random batches for them: to try a loop, a loss or an engine within seconds.

It is in `rl` because tests, benchmarks and users' own tests all need it, and nothing that they share may import the
others. `rl.tiny_tasks` is a task that such a model learns.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl.system.decoders import DENSE
from rl.types import Datum

VOCAB_SIZE = 64
TINY_SHAPE: dict[str, Any] = {
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
"""The shape of every model made here, by the names of `config.json`."""
SERVABLE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "initializer_range": 0.1}
"""Options with which vLLM can serve a tiny model on the CPU; its kernels need heads of at least 32 dimensions."""


def tiny_dense(
    family: str, path: Path, *, tied: bool | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Writes a model of a family of the core, by the `name` of its row in `rl.system.decoders.DENSE`, to `path`.

    It has two layers, four heads, two key-value heads and 64 tokens; `options` go to its configuration. The directory
    holds config, weights and a tokenizer whose words are "w0" to "w63", as every directory made here.
    """
    row = next(row for row in DENSE if row.name == family)
    shape: dict[str, Any] = {"num_key_value_heads": 2, **TINY_SHAPE, **row.tiny, **options}
    shape["tie_word_embeddings"] = row.tied if tied is None else tied
    return save_tiny(AutoModelForCausalLM.from_config, AutoConfig.for_model(row.model_type, **shape), path, dtype)


def tiny_llama(path: Path, *, tied: bool = True, num_kv_heads: int = 2, **options: Any) -> Path:
    """Writes a Llama, as `tiny_dense` does."""
    return tiny_dense("llama", path, tied=tied, num_key_value_heads=num_kv_heads, **options)


def tiny_critic(path: Path) -> Path:
    """Writes the same Llama with a head that gives one value per position instead of logits."""
    options: dict[str, Any] = {**TINY_SHAPE, "num_labels": 1}
    config = LlamaConfig(tie_word_embeddings=False, num_key_value_heads=2, **options)
    return save_tiny(LlamaForSequenceClassification, config, path)


def tiny_qwen3(path: Path, *, tied: bool = True, num_kv_heads: int = 2, head_dim: int = 16, **options: Any) -> Path:
    """Writes a Qwen3, as `tiny_dense` does, whose head size is not hidden size / heads."""
    return tiny_dense("qwen3", path, tied=tied, num_key_value_heads=num_kv_heads, head_dim=head_dim, **options)


def tiny_qwen3_moe(path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Writes a Qwen3 of the same shape with four experts per layer, two of them used per token."""
    options = {
        **TINY_SHAPE,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **options,
    }
    return save_tiny(Qwen3MoeForCausalLM, Qwen3MoeConfig(num_key_value_heads=2, **options), path, dtype)


def save_tiny(model_class: Any, config: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model of any class of transformers with random weights, and the tokenizer, to `path`.

    `config` should hold `TINY_SHAPE`. Norms and biases are random too.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones by default, which would hide a swapped norm
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):  # zeros by default, which would hide a forgotten bias
                torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0").save_pretrained(path)
    return path


def random_batch(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Datum]:
    """One datum per length, with inputs for any policy loss; the first third of each datum has weight 0."""
    rng = np.random.default_rng(seed)
    batch: list[Datum] = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length + 1)
        weights = rng.uniform(0.5, 1.5, length).astype(np.float32)
        weights[: length // 3] = 0
        inputs: dict[str, NDArray[np.int64] | NDArray[np.float32]] = {
            "target_tokens": tokens[1:],
            "weights": weights,
            "logprobs": rng.normal(-4.0, 0.5, length).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
        }
        batch.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return batch


def critic_batch(lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    """A `random_batch` that also has the inputs of the value loss."""
    rng = np.random.default_rng(seed)
    batch: list[Datum] = []
    for datum in random_batch(lengths, seed):
        inputs = {name: rng.normal(size=len(datum.tokens)).astype(np.float32) for name in ("old_values", "returns")}
        batch.append(Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, **inputs}))
    return batch
