"""What vLLM's own kernels compute for decoders, as plain operators on the CPU; see `kernels.py`.

vLLM's operators for attention find keys and values of earlier tokens by themselves, in blocks of `N` tokens that are
strewn over the cache, so they are computed here whole. Legend: as in `kernels.py`; H key-value heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.gpu_pretended.kernels import attend, causal, on_host


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """_C::rms_norm."""
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    out.copy_(normed.to(x.dtype) if weight is None else normed.to(x.dtype) * weight)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """_C::fused_add_rms_norm."""
    residual.copy_(x + residual)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """_C::silu_and_mul."""
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def vocab_parallel_embedding(out: Tensor, ids: Tensor, weight: Tensor, first: int, end: int, *_: int) -> None:
    """_C::vocab_parallel_embedding: rows of this rank's words, from `first` to `end`, and zeros. No word was added."""
    own = (ids >= first) & (ids < end)
    out.copy_(weight[(ids - first).clamp(0, len(weight) - 1)] * own[:, None])


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor | None, size: int, table: Tensor, is_neox: bool) -> None:
    """_C::rotary_embedding, of whole heads whose halves are turned."""
    assert is_neox
    cosine, sine = (x[:, None] for x in table[positions].float().chunk(2, -1))
    assert 2 * cosine.shape[-1] == size
    for each in (q, k):
        if each is not None:
            heads = each.view(len(positions), -1, size)
            one, two = heads.float().chunk(2, -1)
            heads.copy_(torch.cat([one * cosine - two * sine, two * cosine + one * sine], -1))


def topk_softmax(weights: Tensor, ids: Tensor, places: Tensor, logits: Tensor, whole: bool = False, *_: Any) -> None:
    """_moe_C::topk_softmax: logits [T, E] -> probabilities of the best experts, which add up to 1 if `whole`."""
    del places
    found, chosen = logits.float().softmax(-1).topk(ids.shape[1])
    weights.copy_(found / found.sum(-1, keepdim=True) if whole else found)
    ids.copy_(chosen)


def experts(_: Any, *, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **routed: Any) -> None:
    """VLLM's `TritonExperts.apply`: hidden_states [T, in], gates and ups w1 [E, 2 width, in], w2 [E, in, width]."""
    x, up, down, weights, ids = map(on_host, (hidden_states, w1, w2, routed["topk_weights"], routed["topk_ids"]))
    total = torch.zeros(x.shape)
    for expert in range(len(up)):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, value = (x[tokens] @ up[expert].mT).chunk(2, -1)
        found = (torch.nn.functional.silu(gate) * value) @ down[expert].mT
        total.index_add_(0, tokens, weights[tokens, places, None] * found.float())
    on_host(output).copy_(total)


def kv_cache_update(key: Tensor, value: Tensor, layer: Any) -> Tensor:
    """vllm::unified_kv_cache_update: key and value [T, H, D] to their slots."""
    cache, slots = _context(layer)[2:]
    if slots is not None:
        places = on_host(slots)
        real = places >= 0
        places = places[real]
        blocks = on_host(cache).transpose(1, 2)
        both = torch.cat([key[: len(real)], value[: len(real)]], -1)
        blocks[places // blocks.shape[1], places % blocks.shape[1]] = both[real]
    return key.new_empty(0)


def attention(q: Tensor, k: Tensor, v: Tensor, output: Tensor, layer: Any, *_: Any, **__: Any) -> None:
    """vllm::unified_attention_with_output: q and output [T, heads, D]; keys and values are in the cache already."""
    del k, v
    output.zero_()
    about, attending, cache = _context(layer)[:3]
    if about is None:  # vLLM measures its memory
        return
    window = attending.impl.sliding_window[0]
    blocks = on_host(cache).transpose(1, 2)
    starts, lengths = on_host(about.query_start_loc).tolist(), on_host(about.seq_lens).tolist()
    for i, (table, length) in enumerate(zip(on_host(about.block_table), lengths, strict=False)):
        rows = slice(starts[i], starts[i + 1])
        num_queries = rows.stop - rows.start
        if num_queries:
            seen = blocks[table[: -(-length // blocks.shape[1])].long()].flatten(0, 1)[:length].transpose(0, 1)
            keys, values = seen.chunk(2, -1)
            mask, scale = causal(num_queries, length), attending.impl.scale
            if window >= 0:
                mask[torch.ones_like(mask, dtype=torch.bool).tril(length - num_queries - window - 1)] = -torch.inf
            output[rows] = attend(q[rows].transpose(0, 1), keys, values, mask, scale)[0].transpose(0, 1)


def lora_shrink(x: Tensor, stacks: Sequence[Tensor], out: Tensor, *where: Any) -> None:
    """vllm::lora_shrink: x [T, in] by A of each token's adapter [adapters, 1, rank, in] -> out [slices, T, rank]."""
    *batch, scale = where
    out.zero_()
    for tokens, adapter in _adapted(*batch):
        for i, stack in enumerate(stacks):
            out[i, tokens] = scale * (x[tokens].float() @ on_host(stack).squeeze(1)[adapter].mT.float())


def lora_expand(x: Tensor, stacks: Sequence[Tensor], out: Tensor, *where: Any) -> None:
    """vllm::lora_expand: x [slices, T, rank] by B [adapters, 1, width, rank] goes or is added to out [T, widths]."""
    offset, adds = (*where[7:], *(0, False)[len(where) - 7 :])  # torch leaves out what is as by default
    for tokens, adapter in _adapted(*where[:7]):
        first = offset
        for part, stack in zip(x, stacks, strict=True):
            found = part[tokens].to(stack.dtype).float() @ on_host(stack).squeeze(1)[adapter].mT.float()
            columns = slice(first, first := first + found.shape[1])
            out[tokens, columns] = (out[tokens, columns].float() * adds + found).to(out.dtype)


def _adapted(
    of_tokens: Tensor, ordered: Tensor, counts: Tensor, starts: Tensor, slots: Tensor, nobody: Tensor, active: Tensor
) -> Iterator[tuple[Tensor, int]]:
    """The tokens of a batch that each slot's adapter changes, by what vLLM tells its kernels."""
    del of_tokens
    for i in range(0 if nobody.item() else int(active)):
        if (slot := int(slots[i])) >= 0:
            yield ordered[int(starts[i]) :][: int(counts[i])].long(), slot


def _context(layer: Any) -> tuple[Any, Any, Tensor, Tensor | None]:
    """What the layer was told of this step, the layer, its cache [blocks, H, N, 2 D], and the slots of the tokens."""
    from vllm.model_executor.layers.attention import attention as of_vllm

    return of_vllm.get_attention_context(of_vllm._resolve_layer_name(layer))  # pyright: ignore[reportPrivateUsage]


COMPUTED: Mapping[str, Callable[..., Any]] = {
    "_moe_C::topk_softmax": topk_softmax,
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C::vocab_parallel_embedding": vocab_parallel_embedding,
    "vllm::lora_shrink": lora_shrink,
    "vllm::lora_expand": lora_expand,
    "vllm::unified_kv_cache_update": kv_cache_update,
    "vllm::unified_attention_with_output": attention,
}
"""By the names of the operators."""
