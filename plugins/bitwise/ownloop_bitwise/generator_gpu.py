"""Has one vLLM engine on a GPU compute by the table of `ops`. Written against vLLM 0.32.

Products are vLLM's own in its batch-invariant mode, which `BitwiseGenerator` switches on; `cuda.product` calls the same
function. Attention and the log-probs of sampled tokens are set here.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.worker.gpu.sample import logprob

from ownloop_bitwise import cuda, ops
from ownloop_bitwise.sampling import apply_temperature


def change_attention(name: str, layer: Any, window: int, cap: float) -> None:
    """Has a layer attend by `cuda.attend_pages`. Raises ValueError for another window or cap, and for sinks."""
    implementation = layer.impl
    if (
        not isinstance(implementation, TritonAttentionImpl)
        or implementation.sliding_window != ((window - 1, 0) if window else (-1, -1))
        or implementation.logits_soft_cap != cap
        or implementation.sinks is not None
    ):
        raise ValueError(f"numerics is 'bitwise', which has no kernel for the attention of {name}")
    layer.use_direct_call = True  # vLLM's operator is for graphs, and there are none
    implementation.forward = partial(_attend, implementation, window, cap)


def _attend(
    implementation: Any,
    window: int,
    cap: float,
    layer: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    """As the method that it replaces: fills and returns `output` [L, heads, D]. The cache has the keys already."""
    del layer, key, value, output_scale, output_block_scale
    if attn_metadata is None:  # while vLLM measures its memory
        return output.zero_()
    length = attn_metadata.num_actual_tokens
    keys, values = kv_cache.transpose(1, 2).split(implementation.head_size, dim=-1)
    cuda.attend_pages(
        *(query[:length], keys, values, output[:length]),
        *(attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table),
        *(implementation.scale, window, cap),
    )
    return output


def change_sampler(sampler: Any) -> None:
    """Has vLLM's second model runner take log-probs and temperatures by the table. It draws by seed and position."""
    states = sampler.sampling_states

    def apply(_: object, logits: Tensor, rows: Tensor, numbers: object) -> None:
        del numbers
        apply_temperature(logits, states.temperature.gpu[rows], all_random=False)

    states.apply_temperature = MethodType(apply, states)
    logprob.compute_token_logprobs = token_logprobs


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs [n, k] float32 of tokens [n, k] under logits [n, V]. Tokens that are cut off have -inf.

    Of a cut, the kept tokens are summed by their numbers, without gaps, as in the trainer.
    """
    logits = logits.float()
    is_cut = logits == -torch.inf
    counts = logits.shape[1] - is_cut.sum(-1)
    of_kept = logits
    if int(counts.min()) < logits.shape[1]:
        order = is_cut.to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(counts.max())]
        of_kept = logits.gather(1, order)
    lse, _ = ops.log_sum_exp_rows(of_kept)
    return logits.gather(1, ids.long()) - lse[:, None]
