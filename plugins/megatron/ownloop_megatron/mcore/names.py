"""The table of names: which rows of a Megatron-core parameter are which parameter of the Hugging Face model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rl.system.decoders import DecoderConfig
from rl.types import Head
from trainer.engines.pytorch.hf_directory import VALUE_HEAD

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent rows of a Megatron-core parameter."""

    name: str
    """The Hugging Face name."""
    parts: int = 1
    """The rows are cut into this many units, of which the piece has `[start, stop)`."""
    start: int = 0
    stop: int = 1
    sharded_dim: int | None = None
    """The dimension that tensor parallelism shards; None if every rank holds the whole parameter."""
    is_expert: bool = False
    sums_over_tensor_ranks: bool = False
    """Whether a rank's gradient is only that of the heads or of the tokens that it holds."""


# What stays whole on every rank.
_WHOLE = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
}
_HEAD_NORMS = {"self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm"}
# What is sharded by columns.
_COLUMNS = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}


def pieces_of(
    name: str, first_layer: int, first_expert: int, decoder: DecoderConfig, head: Head, *, splits_tokens: bool
) -> list[Piece]:
    """The pieces of the parameter `name` of a stage, in order.

    The stage's layers begin with `first_layer`, its experts with `first_expert`. With `splits_tokens`, tensor-parallel
    ranks hold different tokens outside of attention, matrix products and the heads. Raises ValueError for a parameter
    that is not in the table, which a model provider may have added.
    """
    if name == "embedding.word_embeddings.weight":
        return [Piece("model.embed_tokens.weight", sharded_dim=0)]
    if name == "output_layer.weight":
        return [Piece(VALUE_HEAD)] if head == "value" else [Piece("lm_head.weight", sharded_dim=0)]
    if name == "decoder.final_layernorm.weight":
        return [Piece("model.norm.weight", sums_over_tensor_ranks=splits_tokens)]
    pieces = []
    if (match := _LAYER.fullmatch(name)) is not None:
        layer, kind = f"model.layers.{first_layer + int(match[1])}", match[3]
        pieces = list(_layer_pieces(f"{layer}.{{}}.{kind}", match[2], first_expert, decoder, splits_tokens))
    if not pieces:
        raise ValueError(f"the model has a parameter {name!r}, for which there is no Hugging Face name")
    return pieces


def _layer_pieces(
    form: str, module: str, first_expert: int, decoder: DecoderConfig, splits_tokens: bool
) -> Iterator[Piece]:
    if module in _WHOLE:
        yield Piece(form.format(_WHOLE[module]), sums_over_tensor_ranks=splits_tokens)
    elif module in _HEAD_NORMS:
        yield Piece(form.format(_HEAD_NORMS[module]), sums_over_tensor_ranks=True)
    elif module in _COLUMNS:
        yield Piece(form.format(_COLUMNS[module]), sharded_dim=1)
    elif module == "self_attention.linear_qkv":
        heads, groups = decoder.num_heads, decoder.num_kv_heads
        bounds = (0, heads, heads + groups, heads + 2 * groups)  # in units of heads, so that grouped queries fit
        for letter, start, stop in zip("qkv", bounds, bounds[1:], strict=False):
            yield Piece(form.format(f"self_attn.{letter}_proj"), bounds[-1], start, stop, sharded_dim=0)
    elif module == "mlp.linear_fc1":
        for half, projection in enumerate(("gate_proj", "up_proj")):
            yield Piece(form.format(f"mlp.{projection}"), 2, half, half + 1, sharded_dim=0)
    elif (match := _EXPERT.fullmatch(module)) is not None:
        expert = f"mlp.experts.{first_expert + int(match[1])}"
        if match[2] == "linear_fc2":
            yield Piece(form.format(f"{expert}.down_proj"), is_expert=True)
            return
        for half, projection in enumerate(("gate_proj", "up_proj")):
            yield Piece(form.format(f"{expert}.{projection}"), 2, half, half + 1, is_expert=True)
