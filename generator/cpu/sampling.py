"""Patch of vLLM that draws one random number for each token, with its reason and the condition for its removal.

Written against vLLM 0.32, whose kernel draws one for each word of the vocabulary and takes two logarithms of it (the
Gumbel-max trick). For 128 samples of a vocabulary of 49,152 words that takes 22 ms on two cores; the inverse of the
cumulative distribution takes 3: the words' probabilities are added up in blocks, then within the block in which the
random number falls.

Legend: N samples, V words of the vocabulary.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

_BLOCK_WORDS = 128
_LOG2_E = 1 / math.log(2)


def patch_sampling() -> None:
    """Applies the patch.

    Remove when decoding 128 samples of SmolLM2-135M takes no longer without it: `python -m benchmarks.step`.
    """
    TopKTopPSampler.forward_cpu = _forward_cpu


def _forward_cpu(
    self: Any, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Samples a token of each row of logits [N, V], after top-k and top-p: [N] int64, and what vLLM reports of them."""
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    reported = {"processed_logits": logits, "processed_logprobs": logprobs}.get(self.logprobs_mode)
    uniform = torch.rand(len(logits), dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row] = _draw(generator)
    return sample(logprobs, uniform), reported


def _draw(generator: torch.Generator) -> float:
    """A random number in [0, 1). PyTorch's generators on the CPU use 32 bits of a seed; here all 64 count."""
    drawn = int(torch.randint(1 << 62, (), generator=generator))
    key = generator.initial_seed().to_bytes(8, "little") + drawn.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The word [N] of each row's log-probs [N, V] float32 at which the cumulative probability exceeds `uniform` [N].

    `uniform` is float64, at least 0 and less than 1. A word of probability 0 is never sampled. The distribution is that
    of the log-probs up to the rounding of sums of 128 probabilities in float32.
    """
    num_words = logprobs.shape[1]
    num_blocks = -(-num_words // _BLOCK_WORDS)
    probs = logprobs.new_empty(len(logprobs), num_blocks * _BLOCK_WORDS)
    torch.mul(logprobs, _LOG2_E, out=probs[:, :num_words])
    probs[:, num_words:] = -torch.inf
    blocks = probs.exp2_().view(len(probs), num_blocks, _BLOCK_WORDS)  # a third of the time of powers of e
    up_to = blocks.sum(-1).double().cumsum(-1)
    block, before = _find(up_to, uniform * up_to[:, -1])
    within = blocks[torch.arange(len(blocks)), block].double().cumsum(-1)
    word, _ = _find(within, uniform * up_to[:, -1] - before)
    return (block * _BLOCK_WORDS + word).clamp_(max=num_words - 1)  # logits that are no numbers may lead beyond


def _find(up_to: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry [N] of each row of cumulative sums [N, ...] that exceeds the target, and the sum before it.

    A target that rounding has brought to the last sum or beyond leads to the last entry that adds something.
    """
    target = target.minimum(up_to[:, -1].nextafter(torch.zeros((), dtype=torch.float64)))
    found = torch.searchsorted(up_to, target[:, None], right=True)
    found = found.clamp_(max=up_to.shape[1] - 1)
    before = torch.where(found > 0, up_to.gather(1, (found - 1).clamp(min=0)), 0.0)
    return found[:, 0], before[:, 0]
