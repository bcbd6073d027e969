"""What some kernels of a GPU compute, as plain operators on the CPU.

They are the operators of which the CPU has no kernel, or one with other arguments: attention by documents, as
FlashAttention has it, and the three implementations of scaled dot products. Sums are float32.

Legend: T tokens of a row, Q queries, K keys, D dimensions of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Bounds = list[tuple[slice, slice]]
"""The queries and keys of each document."""


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of one on a pretended GPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    memory = torch._C._construct_storage_from_data_pointer(  # pyright: ignore
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    plain = torch.empty(0, dtype=tensor.dtype)
    return plain.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def causal(num_queries: int, num_keys: int) -> Tensor:
    """[Q, K]: 0 for a key that a query may attend to, minus infinity for later ones. The last query sees all keys."""
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return torch.zeros(num_queries, num_keys).masked_fill(~allowed, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """q [..., heads, Q, D], k and v with as many or fewer heads -> output, and log of the sums [..., heads, Q]."""
    repeat = q.shape[-3] // k.shape[-3]
    probs, sums = _softmax(q, k.repeat_interleave(repeat, -3), bias, scale)
    return (probs @ v.repeat_interleave(repeat, -3).float()).to(q.dtype), sums


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtypes."""
    repeat, grad = q.shape[-3] // k.shape[-3], grad.float()
    keys, values = (x.repeat_interleave(repeat, -3).float() for x in (k, v))
    probs, _ = _softmax(q, keys, bias, scale)
    grad_probs = grad @ values.mT
    grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
    of_heads = [x.unflatten(-3, (-1, repeat)).sum(-3) for x in (grad_scores.mT @ q.float(), probs.mT @ grad)]
    return (grad_scores @ keys).to(q.dtype), of_heads[0].to(k.dtype), of_heads[1].to(v.dtype)


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    scores = q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _options(function: Any, arguments: Sequence[Any], options: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Arguments after the first ones, by the names that this torch gives them."""
    names = [argument.name for argument in function._schema.arguments][first:]
    return {**dict(zip(names, arguments, strict=False)), **options}


def _documents(starts_q: Tensor, starts_k: Tensor | None) -> Bounds:
    """Documents that have queries, from the first positions of all [documents + 1]."""
    of_q, of_k = starts_q.tolist(), (starts_q if starts_k is None else starts_k).tolist()
    pairs = zip(of_q[:-1], of_q[1:], of_k[:-1], of_k[1:], strict=True)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a]


def _document_bias(options: Mapping[str, Any], queries: slice, keys: slice) -> Tensor | None:
    is_causal = options.get("is_causal") or (options.get("window_size") or (-1, -1))[1] == 0
    return causal(queries.stop - queries.start, keys.stop - keys.start) if is_causal else None


def varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor | None, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_attn::_varlen_attn: [T, heads, D] each -> output, log of the sums [heads, T], state of the dropout."""
    options = _options(torch.ops.torch_attn._varlen_attn.default, rest, named, 5)
    output, sums = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for queries, keys in _documents(starts_q, starts_k):
        parts = (q[queries].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
        found, sums[:, queries] = attend(*parts, _document_bias(options, queries, keys), options.get("scale"))
        output[queries] = found.transpose(0, 1)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    starts_q: Tensor,
    starts_k: Tensor | None,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    """torch_attn::_varlen_attn_backward."""
    del output, sums
    options = _options(torch.ops.torch_attn._varlen_attn_backward.default, rest, named, 8)
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    for queries, keys in _documents(starts_q, starts_k):
        parts = [x.transpose(0, 1) for x in (grad[queries], q[queries], k[keys], v[keys])]
        found = attend_backward(
            parts[0], parts[1], parts[2], parts[3], _document_bias(options, queries, keys), options.get("scale")
        )
        for whole, part, where in zip(grads, found, (queries, keys, keys), strict=True):
            whole[where] += part.transpose(0, 1)
    return tuple(whole.to(x.dtype) for whole, x in zip(grads, (q, k, v), strict=True))


def _bias(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor | None:
    return causal(q.shape[-2], k.shape[-2]) if is_causal else None if bias is None else bias.float()


def _as_cuda_lays_out(output: Tensor) -> Tensor:
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _no_seed() -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def sdpa_cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, p: float = 0.0, is_causal: bool = False,
    mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_cudnn_attention."""
    del p, mask
    output, sums = attend(q, k, v, _bias(q, k, bias, is_causal), scale)
    return _as_cuda_lays_out(output), sums[..., None], None, None, q.shape[2], k.shape[2], *_no_seed(), None


def sdpa_cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: Any, cum_k: Any, max_q: int, max_k: int, p: float, is_causal: bool,
    *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_scaled_dot_product_cudnn_attention_backward."""
    return attend_backward(grad, q, k, v, _bias(q, k, bias, is_causal), scale)


def sdpa_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention."""
    del p
    output, sums = attend(q, k, v, _bias(q, k, bias, is_causal), scale)
    return _as_cuda_lays_out(output), sums, *_no_seed()


def sdpa_efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, p: float, wanted: Any, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention_backward."""
    return *attend_backward(grad, q, k, v, _bias(q, k, bias, is_causal), scale), None


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, is_causal: bool = False, mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention."""
    del p, mask
    output, sums = attend(q, k, v, _bias(q, k, None, is_causal), scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    no_mask = torch.zeros(0, dtype=q.dtype)
    return _as_cuda_lays_out(output), sums, None, None, q.shape[2], k.shape[2], seed, seed[0].clone(), no_mask


def sdpa_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    return attend_backward(grad, q, k, v, _bias(q, k, None, is_causal), scale)


def embedding(weight: Tensor, index: Tensor, *_: Any, **__: Any) -> Tensor:
    """aten::embedding. Words that an extension's kernel should have written may be any number; a GPU does not look."""
    return weight[index.clamp(0, len(weight) - 1)]


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: None, block_mask: Any, scale: float | None, enable_gqa: bool,
    return_aux: Any, kernel_options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """FlexAttention without blocks: [1, heads, T, D] each, over every pair of tokens."""
    from torch.nn.attention.flex_attention import AuxOutput

    del score_mod, enable_gqa, kernel_options
    at, to = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None]
    zero = at.new_zeros(())
    bias = torch.zeros(q.shape[2], k.shape[2], device=q.device)
    if block_mask is not None:
        bias = bias.masked_fill(~block_mask.mask_mod(zero, zero, at, to), -torch.inf)
    output, sums = attend(q, k, v, bias, scale)
    return output, AuxOutput(lse=sums if return_aux.lse else None)


COMPUTED: Mapping[str, Callable[..., Any]] = {
    "aten::embedding": embedding,
    "torch_attn::_varlen_attn": varlen,
    "torch_attn::_varlen_attn_backward": varlen_backward,
    "aten::_scaled_dot_product_cudnn_attention": sdpa_cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": sdpa_cudnn_backward,
    "aten::_scaled_dot_product_efficient_attention": sdpa_efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": sdpa_efficient_backward,
    "aten::_scaled_dot_product_flash_attention": sdpa_flash,
    "aten::_scaled_dot_product_flash_attention_backward": sdpa_flash_backward,
}
"""By the names of the operators."""


def _shape_of_varlen(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), sums, q.new_empty(2, dtype=torch.uint64)


def _shape_of_varlen_backward(_: Tensor, *inputs: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs[:3]))


SHAPED: Mapping[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn": _shape_of_varlen,
    "torch_attn::_varlen_attn_backward": _shape_of_varlen_backward,
    "aten::nonzero": lambda x: x.new_empty(x.numel(), x.dim(), dtype=torch.int64),
}
"""On meta tensors, what an operator returns that torch cannot say of by itself."""
