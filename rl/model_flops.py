"""Floating-point operations that a model's matrix products need for packed rows, from its `config.json`.

The source of the method is PaLM (https://arxiv.org/abs/2204.02311), appendix B: two operations for each weight and
token, and the products of attention. Counted is what the result needs: causal pairs of positions only, a shared prefix
once, the output layer at scored positions only. What an engine computes twice to save memory does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.packing import PackedRow
from rl.system.hf_config import read_config
from rl.types import Head

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of one forward pass."""

    per_token: float
    """Of all layers, without attention's products of queries, keys and values."""
    per_scored: float
    """Of the output layer, for one scored position."""
    per_pair: float
    """Of attention in all layers, for a position and another that it attends to."""
    frozen: bool = False
    """Whether only an adapter is trained, so that the weights need no gradient."""

    @classmethod
    def of(cls, model: Path, head: Head = "lm", *, frozen: bool = False) -> "ModelFlops":
        """The operations of the model in a directory. Raises ValueError if its `config.json` is missing or no JSON.

        An architecture that names its sizes in its own way, as GPT-2 does, counts 0, and its runs report no `mfu`.
        """
        config = read_config(model)
        if any(config.get(name) is None for name in _SIZES):
            return cls(per_token=0.0, per_scored=0.0, per_pair=0.0, frozen=frozen)
        hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        head_size = config.get("head_dim") or hidden // heads
        key_value_heads = config.get("num_key_value_heads") or heads
        attention = 2 * hidden * head_size * (heads + key_value_heads)
        return cls(
            per_token=2.0 * layers * (attention + _feed_forward(config)),
            per_scored=2.0 * hidden * (config["vocab_size"] if head == "lm" else 1),
            per_pair=4.0 * layers * heads * head_size,
            frozen=frozen,
        )

    def forward(self, row: PackedRow) -> float:
        """Operations of a forward pass over the row."""
        return self._linear(row) + self._attention(row)

    def training(self, row: PackedRow) -> float:
        """Operations of a forward and a backward pass over the row. An adapter's few do not count."""
        return (2 if self.frozen else 3) * self._linear(row) + 3 * self._attention(row)

    def _linear(self, row: PackedRow) -> float:
        return self.per_token * len(row.tokens) + self.per_scored * len(row.scored)

    def _attention(self, row: PackedRow) -> float:
        return self.per_pair * float(row.positions.sum() + len(row.positions))  # a token attends to all before it


def _feed_forward(config: Mapping[str, Any]) -> int:
    """Weights of a layer's feed-forward network that a token is multiplied with."""
    hidden: int = config["hidden_size"]
    experts_per_token: int | None = config.get("num_experts_per_tok")
    if experts_per_token is None:
        return 3 * hidden * config["intermediate_size"]
    num_experts: int = config.get("num_local_experts") or config["num_experts"]
    return experts_per_token * 3 * hidden * config["moe_intermediate_size"] + hidden * num_experts
