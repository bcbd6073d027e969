"""Samples the tokens of a step that checks drafts, exactly as steps without drafts do: sample, then compare.

At every drafted position the token is sampled by the function that samples without drafts, with the random number that
the position would have had. A draft is accepted if it is that token, and the first that is not ends the step. So
tokens, log-probs and kept sets are those of a generator without drafts, request by request and seed by seed, up to the
rounding of logits that are computed in other batches. A draft d is accepted with the probability p(d), as by rejection
sampling (https://arxiv.org/abs/2211.17192, with a draft that is certain of its token).

Legend: B requests, D drafts of a request at most, R rows of logits (each request's drafts and one more), V tokens of
the vocabulary. Written against vLLM 0.32.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, SamplingMaskLists
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from generator.cpu.sampler import draw

Indices = NDArray[np.int64]


class ExactSampler(torch.nn.Module):
    """Takes the place of vLLM's `RejectionSampler` in a model runner on the CPU.

    vLLM's own is wrong there: it widens its inputs to int64 in a copy that nobody reads
    (`vllm/utils/cpu_triton_utils.py:_expand_kernel_impl`), so that temperature, top-k and top-p of drafted rows are
    uninitialised memory. It draws other random numbers than a step without drafts, too.
    """

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` samples steps without drafts."""
        super().__init__()
        self.sampler = sampler

    def forward(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """Samples every row of logits [R, V] and keeps each request's tokens up to the first that was not drafted.

        The tokens are [B, D + 1], behind them -1.
        """
        assert draft_probs is None
        if not metadata.max_spec_len:
            return self.sampler(logits, sampling)
        sizes = [1 + drafted for drafted in metadata.num_draft_tokens]  # rows of each request
        first = [*itertools.accumulate(sizes, initial=0)]
        owners = torch.tensor([request for request, size in enumerate(sizes) for _ in range(size)])
        logits = logits.to(torch.float32)
        if _changes_logits(sampling):  # of requests that are never drafted for (`Drafter`), so they have one row
            logits[first[:-1]] = self.sampler.apply_logits_processors(logits[first[:-1]], sampling, False)
        before = {i: each.get_state() for i, each in sampling.generators.items() if sizes[i] > 1}
        generators = {first[i] + depth: each for i, each in sampling.generators.items() for depth in range(sizes[i])}
        cutter: Any = self.sampler.topk_topp_sampler
        cutter.kept = None  # of the whole step
        sampled, logprobs = self.sampler.sample(logits, _by_row(sampling, owners, generators))
        sampled = sampled.long()
        num_tokens = _count(metadata, sampled)
        for request, state in before.items():  # the random numbers of rejected rows are drawn again
            if num_tokens[request] < sizes[request]:
                sampling.generators[request].set_state(state)
                for _ in range(num_tokens[request]):
                    draw(sampling.generators[request])
        counts = np.array([depth < most for size, most in zip(sizes, num_tokens, strict=True) for depth in range(size)])
        if cutter.kept is not None:
            cutter.kept = _counted_masks(cutter.kept, counts, num_tokens)
        width = metadata.max_spec_len + 1
        places = np.array([request * width + depth for request, size in enumerate(sizes) for depth in range(size)])
        tokens = np.full(len(sizes) * width, -1, dtype=np.int32)
        tokens[places[counts]] = sampled.numpy()[counts]
        tensors = None
        if sampling.max_num_logprobs is not None:
            assert logprobs is not None
            found = self.sampler.gather_logprobs(logprobs, sampling.max_num_logprobs, sampled)
            tensors = _placed(found, places, len(tokens))
        return SamplerOutput(
            sampled_token_ids=torch.from_numpy(tokens).view(-1, width),
            logprobs_tensors=tensors,
        )


def _by_row(sampling: SamplingMetadata, owners: Tensor, generators: dict[int, torch.Generator]) -> SamplingMetadata:
    """The parameters of requests, for rows with these owners [R], which draw in their order."""
    processors: Any = LogitsProcessors()
    processors.argmax_invariant = [_ByRow(each, owners) for each in sampling.logitsprocs.argmax_invariant]
    return replace(
        sampling,
        temperature=None if sampling.temperature is None else sampling.temperature[owners],
        top_k=None if sampling.top_k is None else sampling.top_k[owners],
        top_p=None if sampling.top_p is None else sampling.top_p[owners],
        generators=generators,
        logitsprocs=processors,
    )


def _count(metadata: SpecDecodeMetadata, sampled: Tensor) -> list[int]:
    """How many sampled tokens of each request count [B]: those that were drafted, and one more."""
    drafts, tokens = iter(metadata.draft_token_ids.tolist()), iter(sampled.tolist())
    found: list[int] = []
    for size in metadata.num_draft_tokens:
        draft, of_request = [*itertools.islice(drafts, size)], [*itertools.islice(tokens, size + 1)]
        right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, of_request, strict=False))
        found.append(1 + sum(1 for _ in right))
    return found


class _ByRow:
    """A logits processor of requests, for rows of logits."""

    def __init__(self, processor: Any, owners: Tensor) -> None:
        assert isinstance(processor, MinPLogitsProcessor), f"{type(processor).__name__} is not proven with drafts"
        self._processor: Any = processor
        self._owners = owners

    def apply(self, logits: Tensor) -> Tensor:
        processor = self._processor
        if not processor.min_p_count:
            return logits
        of_requests, processor.min_p = processor.min_p, processor.min_p[self._owners]
        try:
            return processor.apply(logits)
        finally:
            processor.min_p = of_requests


def _changes_logits(sampling: SamplingMetadata) -> bool:
    """Whether a request has more than temperature, min-p, top-k and top-p."""
    processors = sampling.logitsprocs.non_argmax_invariant
    return bool(
        not sampling.no_penalties
        or sampling.bad_words_token_ids
        or sampling.allowed_token_ids_mask is not None
        or sampling.thinking_budget_state_holder is not None
        or any(getattr(each, "biases", None) or getattr(each, "min_toks", None) for each in processors)
    )


def _placed(found: LogprobsTensors, places: Indices, size: int) -> LogprobsTensors:
    """Log-probs by row, at the places of their tokens in [B x (D + 1)], of which vLLM takes those with a token."""

    def place(rows: Tensor) -> Tensor:
        values = rows.numpy()
        placed = np.zeros((size, *values.shape[1:]), values.dtype)
        placed[places] = values
        return torch.from_numpy(placed)

    return LogprobsTensors(place(found.logprob_token_ids), place(found.logprobs), place(found.selected_token_ranks))


def _counted_masks(kept: SamplingMaskLists, counts: NDArray[np.bool_], num_tokens: list[int]) -> SamplingMaskLists:
    """The kept sets of the rows that count, by request."""
    assert kept.offsets is not None
    sizes = np.diff(kept.offsets)
    offsets = np.concatenate(([0], sizes[counts].cumsum()))
    return SamplingMaskLists(
        kept.token_ids[np.repeat(counts, sizes)], offsets, [*itertools.accumulate(num_tokens, initial=0)]
    )
