"""Parameters and packed rows as the MindSpore process wants them.

Legend: L tokens of a row, H half the size of an attention head.
"""

from collections.abc import Sequence

import numpy as np

from examples.engines.mindspore_engine.messages import Floats, Row
from rl.data.packing import Document, PackedRow
from rl.sampling import KeptSets
from rl.system.decoders import DecoderConfig
from rl.types import Head


def parameter_shapes(decoder: DecoderConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a dense decoder, by Hugging Face name, in the order of the model."""
    dim, hidden_dim = decoder.dim, decoder.hidden_dim
    queries, keys = (heads * decoder.head_dim for heads in (decoder.num_heads, decoder.num_kv_heads))
    of_layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        of_layer[f"self_attn.{name}.weight"] = (size, dim)
        if decoder.family == "qwen2":
            of_layer[f"self_attn.{name}.bias"] = (size,)
    if decoder.family == "qwen3":
        of_layer |= {f"self_attn.{name}.weight": (decoder.head_dim,) for name in ("q_norm", "k_norm")}
    of_layer["self_attn.o_proj.weight"] = (dim, queries)
    of_layer |= {f"mlp.{name}.weight": (hidden_dim, dim) for name in ("gate_proj", "up_proj")}
    of_layer["mlp.down_proj.weight"] = (dim, hidden_dim)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (decoder.vocab_size, dim)}
    for layer in range(decoder.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (dim,)
    if head == "value":
        shapes["score.weight"] = (1, dim)
    elif not decoder.tie_embeddings:
        shapes["lm_head.weight"] = (decoder.vocab_size, dim)
    return shapes


def row_arrays(row: PackedRow, inverse_frequencies: Floats, vocab_size: int) -> Row:
    """A row's tokens, angles and mask. `inverse_frequencies` [H] are the rotary embeddings' angles per position."""
    angles = row.positions[:, None].astype(np.float32) * inverse_frequencies
    return Row(
        tokens=row.tokens,
        cos=np.cos(angles),
        sin=np.sin(angles),
        mask=attention_mask(row.documents),
        scored=row.scored,
        targets=row.targets,
        scale=np.reciprocal(row.temperatures),
        cut=cut_mask(row.kept, vocab_size),
    )


def cut_mask(kept: KeptSets | None, vocab_size: int) -> Floats:
    """[P, V] 0 for tokens that were kept, -1e9 for tokens that were cut off; [1, 1] if none were."""
    if kept is None:
        return np.zeros((1, 1), dtype=np.float32)
    mask = np.repeat(np.where(kept.counts > 0, np.float32(-1e9), np.float32(0)), vocab_size).reshape(-1, vocab_size)
    mask[np.repeat(np.arange(len(kept)), kept.counts), kept.ids] = 0
    return mask


def attention_mask(documents: Sequence[Document]) -> Floats:
    """[L, L] 0 where a token attends to another, -inf elsewhere. The documents have no opening."""
    mask = np.full((sum(document.num_tokens for document in documents),) * 2, -np.inf, dtype=np.float32)
    start = 0
    for document in documents:
        size = document.num_tokens
        allowed = np.tri(size, dtype=bool) & (np.arange(size)[:, None] < document.seen_until())
        stop = start + size
        mask[start:stop, start:stop][allowed] = 0
        start = stop
    return mask
