"""Samples the tokens of a step that checks drafts, exactly as steps without drafts do: sample, then compare.

At every drafted position the token is sampled by the function that samples without drafts, with the random number that
the position would have had. A draft is accepted if it is that token, and the first that is not ends the step. So
tokens, log-probs and kept sets are those of a generator without drafts, request by request and seed by seed, up to the
rounding of logits that are computed in other batches. A draft d is accepted with the probability p(d), as by rejection
sampling (https://arxiv.org/abs/2211.17192, with a draft that is certain of its token).

Legend: B requests, D drafts of a request at most, R rows of logits (each request's drafts and one more), V tokens of
the vocabulary. Written against vLLM 0.32.
"""

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

Rows = NDArray[np.int64]


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
        rows = _Rows(metadata)
        logits = logits.to(torch.float32)
        if _changes_logits(sampling):  # of requests that are never drafted for (`Drafter`), so they have one row
            logits[rows.first] = self.sampler.apply_logits_processors(logits[rows.first], sampling, False)
        before = {i: each.get_state() for i, each in sampling.generators.items() if metadata.num_draft_tokens[i]}
        cutter: Any = self.sampler.topk_topp_sampler
        cutter.kept = None  # of the whole step
        sampled, logprobs = self.sampler.sample(logits, rows.repeat(sampling))
        sampled = sampled.long()
        counts, num_tokens = rows.count(metadata.draft_token_ids, sampled)
        for request, state in before.items():  # the random numbers of rejected rows are drawn again
            sampling.generators[request].set_state(state)
            for _ in range(int(num_tokens[request])):
                draw(sampling.generators[request])
        if cutter.kept is not None:
            cutter.kept = _counted_masks(cutter.kept, counts, num_tokens)
        width = metadata.max_spec_len + 1
        places = rows.owners * width + rows.depth
        tokens = np.full(len(num_tokens) * width, -1, dtype=np.int32)
        tokens[places[counts]] = sampled.numpy()[counts]
        tensors = None
        if sampling.max_num_logprobs is not None:
            assert logprobs is not None
            found = self.sampler.gather_logprobs(logprobs, sampling.max_num_logprobs, sampled)
            tensors = _placed(found, torch.from_numpy(places), len(tokens))
        tokens = torch.from_numpy(tokens).view(-1, width)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=tensors)


class _Rows:
    """Which row of logits belongs to which request."""

    def __init__(self, metadata: SpecDecodeMetadata) -> None:
        per_request = np.array(metadata.num_draft_tokens) + 1  # [B]
        self.first: Rows = per_request.cumsum() - per_request  # [B]
        self.owners: Rows = np.arange(len(per_request)).repeat(per_request)  # [R]
        self.depth: Rows = np.arange(len(self.owners)) - self.first[self.owners]  # [R]: drafts before a row
        self._drafted = metadata.target_logits_indices.numpy()  # [R - B]

    def repeat(self, sampling: SamplingMetadata) -> SamplingMetadata:
        """The requests' parameters, row by row. The rows of a request draw one after the other."""
        processors: Any = LogitsProcessors()
        owners, generators = torch.from_numpy(self.owners), sampling.generators
        processors.argmax_invariant = [_ByRow(each, owners) for each in sampling.logitsprocs.argmax_invariant]
        return replace(
            sampling,
            temperature=None if sampling.temperature is None else sampling.temperature[owners],
            top_k=None if sampling.top_k is None else sampling.top_k[owners],
            top_p=None if sampling.top_p is None else sampling.top_p[owners],
            generators={
                row: generators[owner] for row, owner in enumerate(self.owners.tolist()) if owner in generators
            },
            logitsprocs=processors,
        )

    def count(self, drafts: Tensor, sampled: Tensor) -> tuple["np.ndarray[Any, Any]", Rows]:
        """Whether each row counts [R], because all drafts before it were sampled; and how many of a request do [B]."""
        misses = np.ones(len(self.owners), dtype=np.int64)
        misses[self._drafted] = drafts.numpy() != sampled.numpy()[self._drafted]
        before = misses.cumsum() - misses
        counts = before == before[self.first][self.owners]
        return counts, np.add.reduceat(counts, self.first, dtype=np.int64)


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


def _placed(found: LogprobsTensors, places: Tensor, size: int) -> LogprobsTensors:
    """Log-probs by row, at the places of their tokens in [B x (D + 1)], of which vLLM takes those with a token."""

    def place(rows: Tensor) -> Tensor:
        return rows.new_zeros((size, *rows.shape[1:])).index_copy_(0, places, rows)

    return LogprobsTensors(place(found.logprob_token_ids), place(found.logprobs), place(found.selected_token_ranks))


def _counted_masks(
    kept: SamplingMaskLists, counts: "np.ndarray[Any, Any]", num_tokens: "np.ndarray[Any, Any]"
) -> SamplingMaskLists:
    """The kept sets of the rows that count, by request."""
    assert kept.offsets is not None
    sizes = np.diff(kept.offsets)
    offsets = np.concatenate(([0], sizes[counts].cumsum()))
    return SamplingMaskLists(kept.token_ids[np.repeat(counts, sizes)], offsets, [0, *num_tokens.cumsum().tolist()])
