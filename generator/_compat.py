"""Patches of vLLM, each with its reason and the condition for its removal. Written against vLLM 0.32.

Nothing is patched when this module is imported. The worker that a tensor-parallel group needs on the CPU is in
`_cpu_worker.py`, because vLLM imports it by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import vllm.model_executor.layers.utils as gemm
import vllm.v1.sample.sampler as sampler
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def patch_cpu() -> None:
    """Applies the patches that this process needs on the CPU. To be called before an engine is built, once or more."""
    if not isinstance(gemm.dispatch_cpu_unquantized_gemm, _PackBesideWeight):
        gemm.dispatch_cpu_unquantized_gemm = _PackBesideWeight(gemm.dispatch_cpu_unquantized_gemm)
    sampler.batched_count_greater_than = _no_ranks


@dataclass(frozen=True, slots=True)
class _PackBesideWeight:
    """Keeps the plain weight beside the one that is packed for oneDNN or AMX, so that a pull can load into it.

    vLLM throws the plain weight away, after which `load_weights` fails and `reload_weights` silently keeps the old head
    of a model with tied embeddings. Packed weights are worth their memory and the 0.1 s that packing 135M parameters
    takes at a pull: 1,000 tokens take 2.3 s of CPU time from packed weights and 2.8 s from plain ones, so 200 tokens
    between two pulls pay for it. An input embedding is never multiplied with, so it is not packed.

    Remove when vLLM's `reload_weights` is right for tied embeddings on the CPU and as fast.
    """

    original: Callable[..., None]

    def __call__(self, layer: nn.Module, remove_weight: bool) -> None:
        del remove_weight
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            object.__setattr__(layer, "cpu_linear", nn.functional.linear)
        else:
            self.original(layer, remove_weight=False)


def _no_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Stands in for the rank of the sampled token among all tokens, which nobody here asks for.

    vLLM computes it whenever log-probs are wanted: a pass over the whole vocabulary (7 % of the CPU time of a step with
    SmolLM2), compiled at the first request in 2 to 10 s.

    Remove when vLLM can return log-probs without ranks.
    """
    del values
    return torch.zeros(logprobs.shape[0], dtype=torch.int64, device=logprobs.device)


def pack_weights(model: nn.Module) -> None:
    """Packs what was loaded since, so that the next forward pass computes with it. Does nothing on a GPU."""
    for layer in model.modules():
        if "cpu_linear" in vars(layer):
            del layer.cpu_linear  # first, so that the new packed copy reuses the memory of the old one
            gemm.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
