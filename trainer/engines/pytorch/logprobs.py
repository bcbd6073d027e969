"""Log-probs and entropies of scored positions, in float32, without ever holding the [positions, vocabulary] matrix.

The vocabulary projection is computed one chunk of positions at a time, so that the chunk bounds memory, and again in
the backward pass. A CPU has memory for the logits of many positions, and keeps those as one chunk. It works on a
chunk's logits one block of positions at a time, which stays in its cache. Under tensor parallelism each rank holds some
rows of the projection, and ranks exchange a few numbers per position. The gradient is exact for any loss of the
log-probs and the entropies. Where tokens were sampled from kept sets, a chunk is multiplied with their tokens only.

Legend: S scored positions, C positions of a chunk, D model dimension, V vocabulary rows held here, or used by a chunk,
R rank of an adapter of the projection, with `inner` [S, R] the scaled product of the hidden states and its A.
"""

import functools
import math
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.sampling import KeptSets
from trainer.engines.pytorch import distribution as on_gpu
from trainer.engines.pytorch.distribution import (
    MODEL_DISTRIBUTION,
    ChunkTokens,
    Distribution,
    ScoreKernels,
    local_targets,
)
from trainer.engines.pytorch.low_rank import LowRank, own_rows


class LogitsMemory(threading.local):
    """Memory for logits on the CPU. Each thread has its own, and uses it for one row after the other.

    The kernel clears memory that is new to a process, which takes longer than to fill it. Chunks differ in size from
    row to row, and would leave holes on the heap into which larger ones do not fit.
    """

    def __init__(
        self, *, chunk_bytes: int = 128 << 20, block_bytes: int = 6 << 20, kept_bytes: int = 512 << 20
    ) -> None:
        """Takes no memory yet.

        `chunk_bytes` and `block_bytes` are the sizes of the float32 logits of one chunk, for which more would save
        nothing, and of one block. `kept_bytes` is the size of the logits that a forward pass leaves for its backward
        pass, in the dtype of the weights: 5,461 positions of a vocabulary of 49,152 tokens in bfloat16. Later
        positions are computed again.
        """
        self.chunk_bytes, self.block_bytes, self._kept_bytes = chunk_bytes, block_bytes, kept_bytes
        self._block, self._chunk, self._kept = (torch.empty(0, dtype=torch.uint8) for _ in range(3))
        self._key: object = None
        self._logits = torch.empty(0)

    def block(self, num_positions: int, rows: int) -> Tensor:
        """[C, V] float32 with arbitrary content."""
        num_bytes = num_positions * rows * 4
        self._block = _grown(self._block, num_bytes)
        return self._block[:num_bytes].view(torch.float32).view(num_positions, rows)

    def chunk(self, num_positions: int, weight: Tensor, at_least: int) -> Tensor:
        """[C, V] in the dtype of `weight` [V, D], with arbitrary content.

        `at_least` is the number of logits of later calls.
        """
        num_logits = num_positions * len(weight)
        self._chunk = _grown(self._chunk, max(num_logits, at_least) * weight.element_size())
        return self._chunk.view(weight.dtype)[:num_logits].view(num_positions, len(weight))

    def keep(self, size: int, weight: Tensor) -> object:
        """Prepares for the logits [S, V] of a new row, and forgets another row's. Returns the key to them."""
        num_positions = min(size, self._kept_bytes // (weight.shape[0] * weight.element_size()))
        num_bytes = num_positions * weight.shape[0] * weight.element_size()
        if num_bytes:
            # In powers of two, because each growth leaves a hole. Pages that are never written to take no memory.
            self._kept = _grown(self._kept, 1 << (num_bytes - 1).bit_length())
        self._logits = self._kept[:num_bytes].view(weight.dtype).view(num_positions, weight.shape[0])
        self._key = object()
        return self._key

    def num_kept(self, key: object) -> int:
        """How many positions' logits there is room for; none if another row has taken it."""
        return len(self._logits) if key is not None and key is self._key else 0

    def kept(self, key: object, part: slice) -> Tensor | None:
        """The memory of a chunk's logits [C, V]; None if there is no room, or another row has taken it."""
        return self._logits[part] if part.stop <= self.num_kept(key) else None

    def forget(self, key: object) -> None:
        """Forgets the logits of this row, whose memory is used again."""
        if key is self._key:
            self._key = None


def _grown(memory: Tensor, num_bytes: int) -> Tensor:
    """Memory of at least so many bytes, whose content may be lost."""
    return memory if len(memory) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)


MEMORY = LogitsMemory()
_MIN_CHUNK_BYTES_ON_GPU = 128 << 20
# Positions whose kept sets are put together on the CPU: fewer have fewer different tokens, and more share the time in
# which the rows of these tokens are gathered.
_KEPT_POSITIONS = 256
_LOG2_E = 1 / math.log(2)


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: bool,
    group: dist.ProcessGroup | None = None,
    low_rank: LowRank | None = None,
    distribution: Distribution = MODEL_DISTRIBUTION,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores each target under the softmax of `hidden @ weight.T`, to which `low_rank` adds its product.

    With a `cap`, each logit x becomes cap * tanh(x / cap), as in Gemma 2 (https://arxiv.org/abs/2408.00118).
    `distribution` divides the logits, leaves tokens out, and may widen the product to float32; by default it does not.

    `hidden` [S, D] and `weight` [V, D] share a dtype; `targets` [S] are int64. In a `group`, which a `weight` that is a
    DTensor brings, rank r holds the vocabulary rows r*V to r*V + V - 1, of the low rank's B too, and the gradients of
    `hidden` and of its A are this rank's parts of sums over the group. Returns log-probs [S] float32 and, if asked for,
    entropies [S] float32 in nats; both are differentiable. Of float64 they are float64.
    """
    if isinstance(weight, DTensor):
        weight, group, low_rank = own_rows(weight, low_rank)
    hidden, weight = distribution.widen(hidden), distribution.widen(weight)
    if distribution.kept is not None and not distribution.kept.counts.all():
        return _in_two(hidden, weight, targets, distribution, entropy=entropy, group=group, low_rank=low_rank, cap=cap)
    inner, b = (None, None) if low_rank is None else (low_rank.down(hidden), low_rank.b.to(weight.dtype))
    has_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, inner, b)
    )
    keeps = has_gradient and hidden.device.type == "cpu" and distribution.kept is None
    key = MEMORY.keep(hidden.shape[0], weight) if keeps else None
    logprobs, entropies = _ChunkedLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        *(hidden, weight, inner, b, targets), entropy, group, key, distribution, cap
    )
    return logprobs, entropies


def values(hidden: Tensor, weight: Tensor) -> Tensor:
    """The values [S] float32 that a value head of weight [1, D] gives hidden states [S, D]."""
    return (hidden.float() @ weight.float().T)[:, 0]


def _in_two(
    hidden: Tensor, weight: Tensor, targets: Tensor, distribution: Distribution, *, entropy: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`logprobs_and_entropy` of positions with kept sets, and of others."""
    assert distribution.kept is not None
    is_cut = torch.from_numpy(distribution.kept.counts > 0).to(hidden.device)
    cut, whole = is_cut.nonzero()[:, 0], (~is_cut).nonzero()[:, 0]
    scored = [
        logprobs_and_entropy(hidden[where], weight, targets[where], entropy=entropy, distribution=part, **options)
        for where, part in ((cut, distribution.at(cut)), (whole, replace(distribution.at(whole), kept=None)))
    ]
    order = torch.cat([cut, whole]).argsort()
    entropies = [of_part for _, of_part in scored if of_part is not None]
    return torch.cat([of_part for of_part, _ in scored])[order], torch.cat(entropies)[order] if entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        inner: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        entropy: bool,
        group: dist.ProcessGroup | None,
        key: object,
        distribution: Distribution,
        cap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        size = hidden.shape[0]
        lse = hidden.new_empty(size, dtype=_exact(hidden))
        logprobs = torch.empty_like(lse)
        entropies = torch.empty_like(lse) if entropy else None
        ctx.start_row = start_row = 0 if group is None else dist.get_rank(group) * weight.shape[0]
        ctx.key, ctx.scale, ctx.cap, kept = key, distribution.scale, cap, distribution.kept
        ctx.kernels = kernels = distribution.kernels
        ctx.parts = None if kept is None else _parts_with_tokens(hidden, weight, kept, start_row)
        for part, tokens in ctx.parts or _parts(hidden, weight, key):
            logits = _logits((hidden, weight, inner, b), part, tokens, cap, kernels, out=MEMORY.kept(key, part))
            column, here = local_targets(targets[part] - start_row, weight.shape[0], tokens)
            scale = None if ctx.scale is None else ctx.scale[part]
            chosen = logits.gather(1, column[:, None])[:, 0].to(lse.dtype) * (here if scale is None else here * scale)
            sums = _softmax_sums if kernels is None else partial(kernels.softmax_sums, tokens)
            log_sum, expected = sums(logits, entropy, scale)
            lse[part] = _sum_over(group, log_sum.clone(), log=True)
            logprobs[part] = _sum_over(group, chosen) - lse[part]
            if entropies is not None and expected is not None:
                entropies[part] = lse[part] - _sum_over(group, expected * torch.exp(log_sum - lse[part]))
        ctx.save_for_backward(hidden, weight, inner, b, targets, lse, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, inner, b, targets, lse, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_inner = None if inner is None else torch.empty_like(inner)
        grad_weight: Tensor | None = None
        grad_b: Tensor | None = None
        for part, tokens in ctx.parts or _parts(hidden, weight, ctx.key):
            logits = MEMORY.kept(ctx.key, part)
            if logits is None:
                logits = _logits((hidden, weight, inner, b), part, tokens, ctx.cap, ctx.kernels)
            column, here = local_targets(targets[part] - ctx.start_row, weight.shape[0], tokens)
            of_entropy = None if grad_entropies is None else (grad_entropies[part], entropies[part])
            scale = None if ctx.scale is None else ctx.scale[part]
            grad_logits = _gradient_(logits, lse[part], grad_logprobs[part], column, here, of_entropy, scale, ctx.cap)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight if tokens is None else tokens.of_tensor(weight), out=grad_hidden[part])
            if ctx.needs_input_grad[1]:  # a frozen weight needs none, and it takes a third of the time
                grad_weight = _added(grad_weight, grad_logits.T @ hidden[part], weight, tokens)
            if inner is not None and grad_inner is not None:
                torch.mm(grad_logits, b if tokens is None else tokens.of_tensor(b), out=grad_inner[part])
                grad_b = _added(grad_b, grad_logits.T @ inner[part], b, tokens)
        MEMORY.forget(ctx.key)  # gradients have taken the place of the logits
        grad_weight = _like(weight, grad_weight) if ctx.needs_input_grad[1] else None
        grad_b = None if b is None else _like(b, grad_b)
        return grad_hidden, grad_weight, grad_inner, grad_b, *(None,) * 6


def _exact(tensor: Tensor) -> torch.dtype:
    """The dtype of what is computed of a tensor's logits."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _added(total: Tensor | None, update: Tensor, tensor: Tensor, tokens: ChunkTokens | None) -> Tensor:
    """The sum over chunks of the gradients of a tensor's rows, in float32 as soon as there are two."""
    if tokens is not None and tokens.rows is not None:
        total = torch.zeros_like(tensor, dtype=_exact(tensor)) if total is None else total
        return total.index_add_(0, tokens.rows, update.to(total.dtype))
    return update if total is None else total.to(_exact(tensor)).add_(update)


def _like(tensor: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient in the dtype of its tensor, and zeros if there was no position."""
    return torch.zeros_like(tensor) if grad is None else grad.to(tensor.dtype)


def _chunk_bytes(device: torch.device) -> int:
    return MEMORY.chunk_bytes if device.type != "cuda" else chunk_bytes_on_gpu(_gpu_memory_bytes(device))


@functools.cache
def _gpu_memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def chunk_bytes_on_gpu(memory_bytes: int) -> int:
    """Size of the float32 logits of one chunk on a GPU with so much memory: a 64th of it.

    Every chunk reads and writes the whole gradient of the projection, which takes as long as the products of some 600
    positions on an H100. A 64th of its 80 GB is 2,200 positions of a vocabulary of 152,000 tokens.
    """
    return max(_MIN_CHUNK_BYTES_ON_GPU, memory_bytes // 64)


def _parts(hidden: Tensor, weight: Tensor, key: object) -> list[tuple[slice, None]]:
    """Cuts S positions into those whose logits are kept, in one part, and chunks of the others.

    Each part adds a [V, D] gradient to the sum, which takes as long as the products of hundreds of positions.
    """
    num_kept = MEMORY.num_kept(key)
    others = _chunks(hidden.shape[0] - num_kept, weight.shape[0], _chunk_bytes(hidden.device))
    parts = [(slice(num_kept + part.start, num_kept + part.stop), None) for part in others]
    return [(slice(0, num_kept), None), *parts] if num_kept else parts


def _parts_with_tokens(
    hidden: Tensor, weight: Tensor, kept: KeptSets, start_row: int
) -> list[tuple[slice, ChunkTokens]]:
    """Cuts S positions into chunks, each with the tokens of its kept sets: all tokens if they are half of all or
    more."""

    def with_tokens(limit_bytes: int, *, gathers: bool) -> list[tuple[slice, ChunkTokens]]:
        here = (start_row, len(weight), hidden.device)
        parts = _chunks(len(hidden), len(weight), limit_bytes)
        return [(part, ChunkTokens.of(kept.part(part.start, part.stop), *here, gathers=gathers)) for part in parts]

    limit = _KEPT_POSITIONS * len(weight) * 4 if hidden.device.type == "cpu" else _chunk_bytes(hidden.device)
    parts = with_tokens(limit, gathers=True)
    num_rows = sum(len(tokens.rows) for _, tokens in parts if tokens.rows is not None)
    return parts if 2 * num_rows < len(parts) * len(weight) else with_tokens(_chunk_bytes(hidden.device), gathers=False)


def _chunks(size: int, rows: int, limit_bytes: int) -> list[slice]:
    """Cuts S positions into chunks of equal size within the memory bound."""
    num_chunks = max(1, -(-size * rows * 4 // limit_bytes))
    step = max(1, -(-size // num_chunks))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _logits(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    part: slice,
    tokens: ChunkTokens | None,
    cap: float | None,
    kernels: ScoreKernels | None,
    out: Tensor | None = None,
) -> Tensor:
    """[C, V] in the dtype of the weights, of `hidden`, `weight`, `inner` and `b`. With `tokens`, V is their number."""
    hidden, weight, inner, b = operands
    weight = weight if tokens is None else tokens.of_tensor(weight)
    if out is None and weight.device.type == "cpu":
        out = MEMORY.chunk(part.stop - part.start, weight, MEMORY.chunk_bytes // 4)
    logits = torch.mm(hidden[part], weight.T, out=out) if kernels is None else kernels.logits(hidden[part], weight, out)
    if inner is not None and b is not None:
        b = b if tokens is None else tokens.of_tensor(b)
        logits.addmm_(inner[part], b.T) if kernels is None else logits.add_(kernels.logits(inner[part], b, None))
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap) if kernels is None else kernels.capped(logits, cap)
    return logits if tokens is None else tokens.restrict_(logits)


def _softmax_sums(logits: Tensor, entropy: bool, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of logits [C, V] times scale [C], log of the sum of exponentials and, for entropies, the expected logit: [C]."""
    if logits.is_cuda:
        return on_gpu.fused(on_gpu.sums_of_rows)(logits, entropy, scale)
    log_sum = logits.new_empty(len(logits), dtype=_exact(logits))
    expected = torch.empty_like(log_sum) if entropy else None
    for rows in _blocks(logits):
        block = _float32(logits[rows], scale, rows)
        largest = block.amax(-1)
        total = _exp_(block.sub_(largest[:, None])).sum(-1)
        log_sum[rows] = total.log().add_(largest)
        if expected is not None:
            expected[rows] = block.mul_(logits[rows]).sum(-1).div_(total)
    return log_sum, expected if expected is None or scale is None else expected * scale


def _gradient_(
    logits: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    column: Tensor,
    here: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    scale: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Turns logits [C, V] into the gradient of the projection's output.

    `of_entropy` are the entropies' gradients and values; all are [C].
    """
    if logits.is_cuda:
        return on_gpu.fused(on_gpu.gradient_of_rows)(logits, lse, grad_logprobs, column, here, of_entropy, scale, cap)
    # With z the scaled logits, p their softmax and H the entropy:
    # d logprob / dz_j = [j is the target] - p_j   and   dH / dz_j = -p_j (z_j - lse + H).
    for rows in _blocks(logits):
        log_p = _float32(logits[rows], scale, rows).sub_(lse[rows, None])
        factor = -grad_logprobs[rows, None]
        if of_entropy is not None:
            grad_entropies, entropies = (x[rows, None] for x in of_entropy)
            factor = factor - grad_entropies * (log_p + entropies)
        of_target = grad_logprobs[rows] * here[rows]
        if scale is not None:
            factor, of_target = factor * scale[rows, None], of_target * scale[rows]
        block = _exp_(log_p).mul_(factor)
        block.scatter_add_(1, column[rows, None], of_target[:, None])
        if cap is not None:  # of y = cap tanh(x / cap): dy / dx = 1 - (y / cap)^2, and 0 for a token that was cut off
            block.mul_(1 - (logits[rows].to(block.dtype).clamp(-cap, cap) / cap).square_())
        logits[rows] = block
    return logits


def _blocks(logits: Tensor) -> list[slice]:
    """Cuts a chunk [C, V] into blocks of rows that a CPU's cache holds."""
    step = max(1, MEMORY.block_bytes // (4 * logits.shape[1]))
    return [slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step)]


def _float32(logits: Tensor, scale: Tensor | None, rows: slice) -> Tensor:
    """A block's scaled logits in float32, in memory of their own."""
    block = logits.clone() if logits.dtype == torch.float64 else MEMORY.block(*logits.shape).copy_(logits)
    return block if scale is None else block.mul_(scale[rows, None])


def _exp_(x: Tensor) -> Tensor:
    """`x.exp_()` in less time: PyTorch computes powers of 2 on the CPU in a third of the time of powers of e."""
    return x.mul_(_LOG2_E).exp2_()


def _sum_over(group: dist.ProcessGroup | None, value: Tensor, *, log: bool = False) -> Tensor:
    """Sums a [C] tensor over the group; with `log`, returns the log of the summed exponentials."""
    if group is None:
        return value
    if not log:
        dist.all_reduce(value, group=group)
        return value
    largest = value.clone()  # subtracted before `exp`, which would overflow otherwise
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = torch.exp(value - largest)
    dist.all_reduce(total, group=group)
    return largest + total.log()
