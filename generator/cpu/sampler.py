"""Samples tokens on the CPU, and returns the tokens that a cut has left for each: a patch of vLLM 0.32.

Nothing is patched when this module is imported. Legend: N samples, V tokens of the vocabulary, K tokens at most that
the top-k of any of these samples leaves, n samples whose distribution is cut.

vLLM's own way from here on: the runner's output -> the scheduler cuts it by request -> the output's `sampling_mask`.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

sample_tokens: Any = GPUModelRunner.sample_tokens
_BLOCK_TOKENS = 128
_GROUP_TOKENS = 32
_LOWEST = torch.finfo(torch.float32).min
_LOG2_E = 1 / math.log(2)


def patch_sampling() -> None:
    """Has the CPU sample with one random number, cut without sorting the vocabulary, and return what was kept.

    vLLM's kernel draws a random number for each token of the vocabulary and takes two logarithms of it (the Gumbel-max
    trick). For 128 samples of a vocabulary of 49,152 tokens that takes 22 ms on two cores, and `sample` takes 3. For a
    top-p vLLM sorts the vocabulary, in 200 ms, and `cut` takes 10. vLLM's `return_sampling_mask` needs its other model
    runner, which needs Triton.

    Remove when decoding 128 samples of SmolLM2-135M takes no longer without it (`python -m benchmarks.step`), also with
    a top-p, and `return_sampling_mask` is supported on the CPU.
    """
    TopKTopPSampler.forward_cpu = _forward_cpu
    setattr(TopKTopPSampler, "cut", staticmethod(cut))  # noqa: B010
    setattr(TopKTopPSampler, "log_softmax", staticmethod(log_softmax))  # noqa: B010
    setattr(CPUModelRunner, "sample_tokens", sample_with_kept_sets)  # noqa: B010


def return_kept_sets(engine: LLMEngine) -> None:
    """Has the scheduler of an engine pass on what `sample_with_kept_sets` returns.

    Without the option `return_sampling_mask`, for which vLLM would refuse requests that cut nothing.
    """
    core: Any = engine.engine_core
    core.engine_core.scheduler.return_sampling_mask = True


def sample_with_kept_sets(self: Any, grammar_output: object) -> Any:
    """vLLM's own method with the kept sets in its output, if a distribution was cut."""
    sampler = self.sampler.topk_topp_sampler
    sampler.kept = None
    output = sample_tokens(self, grammar_output)
    if sampler.kept is not None:
        output.sampling_masks = sampler.kept
    return output


def _forward_cpu(
    self: Any, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Samples a token of each row of logits [N, V], after top-k and top-p: [N] int64, and the log-probs [N, V].

    Leaves the kept sets in `self.kept`. The log-probs take the place of the logits.
    """
    num_rows, vocab_size = logits.shape
    uniform = torch.rand(num_rows, dtype=torch.float64)
    numbers = uniform.numpy()
    for row, generator in generators.items():
        numbers[row] = draw(generator)
    k = torch.full((num_rows,), vocab_size) if k is None else k
    p = torch.ones(num_rows) if p is None else p
    rows = ((k < vocab_size) | (p < 1)).nonzero()[:, 0]
    if not len(rows):
        logprobs = self.log_softmax(logits)
        return sample(logprobs, uniform), logprobs
    ids, kept = self.cut(logits if len(rows) == num_rows else logits[rows], k[rows], p[rows])
    self.kept = _as_masks(ids, kept, rows, num_rows, vocab_size)
    tokens = ids.gather(1, sample(kept, uniform[rows])[:, None])[:, 0]
    if len(rows) == num_rows:
        return tokens, logits.fill_(-torch.inf).scatter_(1, ids, kept)
    logprobs = self.log_softmax(logits)
    all_tokens = sample(logprobs, uniform).index_copy_(0, rows, tokens)
    of_cut = torch.full((len(rows), vocab_size), -torch.inf).scatter_(1, ids, kept)
    return all_tokens, logprobs.index_copy_(0, rows, of_cut)


def log_softmax(logits: Tensor) -> Tensor:
    """The log-probs of logits [N, V]."""
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def cut(logits: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the k [n] most probable tokens of each row of logits [n, V], and of these the fewest of probability p [n].

    Returns ids [n, K], the most probable first, and their log-probs [n, K], -inf for tokens that are not kept. A token
    whose logit is -inf is not kept either.
    """
    logits, ids = _most_probable(logits, int(k.max()))
    logits = logits.masked_fill(torch.arange(logits.shape[1]) >= k[:, None], -torch.inf)
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    before = probs.cumsum(-1).sub_(probs)
    is_cut = (before >= p[:, None]) & (p[:, None] < 1)
    is_cut[:, 0] = False
    return ids, log_softmax(logits.masked_fill_(is_cut, -torch.inf))


def _most_probable(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`logits.topk(k)`, of which at most k logits are finite, in a fraction of its time for a k that is far below V."""
    few, ids = candidates(logits, k)
    top = few.topk(k, dim=-1)
    return top.values, top.indices if ids is None else ids.gather(1, top.indices)


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """Logits among which are the k largest of each row that are finite, and their columns, rising; None for all.

    At least k tokens reach the k-th largest maximum of groups of tokens, so that all others can be left out before.
    """
    (num_rows, vocab_size), num_groups = logits.shape, logits.shape[1] // _GROUP_TOKENS
    if num_groups < 2 * k:
        return logits, None
    largest = logits[:, : num_groups * _GROUP_TOKENS].view(num_rows, _GROUP_TOKENS, num_groups).amax(1)
    lowest = torch.from_numpy(np.partition(largest.numpy(), num_groups - k, axis=1)[:, num_groups - k])
    found = torch.from_numpy(np.flatnonzero((logits >= lowest[:, None].clamp(min=_LOWEST)).numpy()))
    rows = found // vocab_size
    counts = torch.bincount(rows, minlength=num_rows)
    places = torch.arange(len(found)) - (counts.cumsum(0) - counts)[rows]
    shape = (num_rows, max(k, int(counts.max())))
    few = torch.full(shape, -torch.inf).index_put_((rows, places), logits.view(-1)[found])
    return few, torch.zeros(shape, dtype=torch.int64).index_put_((rows, places), found % vocab_size)


def _as_masks(ids: Tensor, kept: Tensor, rows: Tensor, num_rows: int, vocab_size: int) -> SamplingMaskLists:
    """The kept tokens of `rows`, rising, and none of other rows, in vLLM's form."""
    counts = (kept > -torch.inf).sum(-1)  # the first tokens of each row are kept
    most = int(counts.max())
    rising = ids[:, :most].masked_fill(torch.arange(most) >= counts[:, None], vocab_size).sort(-1).values
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    offsets[rows.numpy() + 1] = counts.numpy()
    return SamplingMaskLists(rising[rising < vocab_size].to(torch.int32).numpy(), offsets.cumsum())


def draw(generator: torch.Generator) -> float:
    """A random number in [0, 1). PyTorch's generators on the CPU use 32 bits of a seed; here all 64 count."""
    drawn = int(torch.randint(1 << 62, (), generator=generator))
    key = generator.initial_seed().to_bytes(8, "little") + drawn.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The token [N] of each row's log-probs [N, V] float32 at which the cumulative probability exceeds `uniform` [N].

    N is the number of samples and V that of the vocabulary's tokens. Probabilities are added up in blocks, then within
    the block in which the random number falls.

    `uniform` is float64, at least 0 and less than 1. A token of probability 0 is never sampled. The distribution is
    that of the log-probs up to the rounding of sums of 128 probabilities in float32."""
    vocab_size = logprobs.shape[1]
    num_blocks = -(-vocab_size // _BLOCK_TOKENS)
    probs = logprobs.new_empty(len(logprobs), num_blocks * _BLOCK_TOKENS)
    torch.mul(logprobs, _LOG2_E, out=probs[:, :vocab_size])
    probs[:, vocab_size:] = -torch.inf
    blocks = probs.exp2_().view(len(probs), num_blocks, _BLOCK_TOKENS)  # a third of the time of powers of e
    up_to = blocks.sum(-1).double().cumsum(-1)
    block, before = _find(up_to, uniform * up_to[:, -1])
    within = blocks[torch.arange(len(blocks)), block].double().cumsum(-1)
    within_block, _ = _find(within, uniform * up_to[:, -1] - before)
    return (block * _BLOCK_TOKENS + within_block).clamp_(
        max=vocab_size - 1
    )  # logits that are no numbers may lead beyond


def _find(up_to: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry [N] of each row of cumulative sums [N, ...] that exceeds the target, and the sum before it.

    A target that rounding has brought to the last sum or beyond leads to the last entry that adds something.
    """
    target = target.minimum(up_to[:, -1].nextafter(torch.zeros((), dtype=torch.float64)))
    found = torch.searchsorted(up_to, target[:, None], right=True)
    found = found.clamp_(max=up_to.shape[1] - 1)
    before = torch.where(found > 0, up_to.gather(1, (found - 1).clamp(min=0)), 0.0)
    return found[:, 0], before[:, 0]
