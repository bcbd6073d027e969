"""Converts our requests to vLLM's types, and vLLM's answers to ours.

vLLM notes for each token one version of the weights of the whole engine. Here that is the number of updates before the
token, and each `ServedPolicy` knows at which of them it changed.
"""

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import vllm
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from rl.lora import Policy
from rl.rollouts.tokenizer import said_tokens, special_tokens, text_of
from rl.sampling import KeptSets, Routes
from rl.types import Completion, SamplingParams


class ServedPolicy:
    """One policy of an engine. Requests refer to it until they have finished, even if it was dropped."""

    def __init__(self, policy: Policy, version: int, update: int, lora_request: Any = None) -> None:
        """`update` is the number of the update that loaded it; `lora_request` is how vLLM is asked for it."""
        self.policy = policy
        self.lora_request = lora_request
        self._updates = [update]
        self._versions = [version]

    @property
    def version(self) -> int:
        """The newest version."""
        return self._versions[-1]

    def replace(self, version: int, update: int, lora_request: Any = None) -> None:
        """Notes that another version is in use since an update."""
        self.lora_request = lora_request
        self._updates.append(update)
        self._versions.append(version)

    def version_at(self, update: int) -> int:
        """The version that was in use when so many updates had been made."""
        return self._versions[bisect.bisect_right(self._updates, update) - 1]

    def name_versions(self, output: RequestOutput) -> None:
        """Puts this policy's versions in the place of vLLM's, which an output has of the samples that have ended."""
        for sample in output.outputs:
            for span in sample.weight_versions or ():
                span.version = str(self.version_at(int(span.version)))


def unknown_policy(policy: Policy, known: Iterable[Policy]) -> ValueError:
    """The error for a policy that was never pulled, or was dropped."""
    names = ", ".join(map(repr, known))
    return ValueError(f"policy is {policy!r}, which this generator does not have; it has {names}")


def bounded(sampling: SamplingParams, vocab_size: int, *, masks_all: bool) -> SamplingParams:
    """The request as vLLM has to be asked, if kept tokens are to be returned.

    For a top-k of the whole vocabulary it would return none, so the least probable token is left out. With `masks_all`,
    an engine of vLLM's option `return_sampling_mask`, it refuses greedy and uncut requests. Raises ValueError for a
    stop token that the model does not have.
    """
    if (last := max(sampling.stop_token_ids, default=0)) >= vocab_size:
        raise ValueError(f"SamplingParams.stop_token_ids has {last}; token ids are between 0 and {vocab_size - 1}")
    if masks_all and sampling.temperature == 0:
        return replace(sampling, temperature=1.0, top_k=1)
    if masks_all and not sampling.cuts:
        return replace(sampling, top_k=vocab_size)
    return replace(sampling, top_k=min(sampling.most_kept, vocab_size - 1))


def to_vllm(sampling: SamplingParams, num_samples: int, tokenizer: Any) -> vllm.SamplingParams:
    """The same request in vLLM's type. vLLM gives sample i the seed `seed + i`.

    A stop string that is one special token becomes a stop token: vLLM looks for strings in text without these. Raises
    ValueError for a stop string that has other text next to a special token, and for any stop string if `tokenizer` is
    None.
    """
    known = special_tokens(tokenizer) if sampling.stop and tokenizer is not None else {}
    special = {text: number for number, text in known.items()}
    strings = [stop for stop in sampling.stop if stop not in special]
    if strings and tokenizer is None:
        raise ValueError(f"SamplingParams.stop is {sampling.stop}; the model has no tokenizer to find it")
    for stop in strings:
        if found := next((token for token in special if token in stop), None):
            raise ValueError(
                f"SamplingParams.stop has {stop!r}, which is never found: {found!r} is a special token, which the text "
                f"lacks; {found!r} alone can be a stop string"
            )
    return vllm.SamplingParams(
        n=num_samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.most_kept,
        min_p=sampling.min_p,
        stop=strings,
        stop_token_ids=[*sampling.stop_token_ids, *(special[stop] for stop in sampling.stop if stop in special)],
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=0,  # of the sampled tokens alone
        prompt_logprobs=sampling.topk_prompt_logprobs if sampling.scores_prompt else None,
        flat_logprobs=True,
        detokenize=bool(strings),  # token by token is slow, and only stop strings need it
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_completions(output: RequestOutput, tokenizer: Any, ends: Collection[int]) -> list[Completion]:
    """Converts a finished request. All its samples have the prompt's routes of the first one, as one array."""
    first, *others = [to_completion(each, tokenizer, output.prompt_logprobs, ends) for each in output.outputs]
    if (routes := first.routes) is None:
        return [first, *others]
    return [first, *(replace(each, routes=replace(each.routes or routes, prompt=routes.prompt)) for each in others)]


def to_completion(
    sample: CompletionOutput, tokenizer: Any, prompt_logprobs: Any, ends: Collection[int] = ()
) -> Completion:
    """Converts a finished sample. `prompt_logprobs` are the flat ones of vLLM's request output, or None.

    `ends` are the model's own end tokens, some of which may be no special tokens of the tokenizer.
    Without a tokenizer the text is empty. Raises RuntimeError if vLLM did not finish the sample.
    """
    tokens = tuple(sample.token_ids)
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request after {len(tokens)} tokens: {sample.finish_reason}")
    assert sample.logprobs is not None
    assert sample.weight_versions is not None
    return Completion(
        tokens=tokens,
        logprobs=tuple(sample.logprobs.logprobs),  # pyright: ignore[reportAttributeAccessIssue]
        versions=tuple(int(span.version) for span in sample.weight_versions for _ in range(span.start, span.end)),
        text="" if tokenizer is None else _text(sample, tokenizer, ends),
        finish_reason=sample.finish_reason,
        routes=None if sample.routed_experts is None else _routes(sample.routed_experts, len(tokens) - 1),
        kept=None if sample.sampling_mask is None else kept_sets(sample.sampling_mask.token_ids),
        prompt_logprobs=None if prompt_logprobs is None else _of_prompt(prompt_logprobs),
        topk_prompt_logprobs=None if prompt_logprobs is None else _most_probable(prompt_logprobs),
    )


def kept_sets(steps: Sequence[Any]) -> KeptSets | None:
    """The tokens that were kept, by steps of one token or more (`_compat.patch_masks`); None if nothing was cut off."""
    ids = np.concatenate([step.token_ids for step in steps])
    counts = [n for step in steps for n in ([len(step.token_ids)] if step.offsets is None else np.diff(step.offsets))]
    return KeptSets(ids, np.cumsum([0, *counts], dtype=np.int64)).compact() if len(ids) else None


def _routes(experts: Any, num_sampled: int) -> Routes:
    """The experts [tokens, layers, k] of a prompt and of the sampled tokens but the last, in two arrays."""
    since = len(experts) - num_sampled
    return Routes(experts[:since], experts[since:].copy())  # a view would keep a second copy of the prompt's


def _text(sample: CompletionOutput, tokenizer: Any, ends: Collection[int]) -> str:
    """The text of a sample, without the stop string, the special token or the model's end token that ended it."""
    tokens, stop = tuple(sample.token_ids), sample.stop_reason
    if isinstance(stop, str):
        # vLLM looks for it in text without special tokens, which may begin with a space that decoding leaves out. So it
        # is cut off here, behind the last special token that is text: in front of that it would have been found before.
        said = said_tokens(tokenizer)
        behind = next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] in said), 0)
        text = text_of(tokenizer, tokens)
        place = text.find(stop, len(text_of(tokenizer, tokens[:behind])))
        return text[:place] if place >= 0 else sample.text
    ended = sample.finish_reason == "stop" and tokens and tokens[-1] in {*special_tokens(tokenizer), *ends}
    return text_of(tokenizer, tokens[:-1] if ended else tokens)


def _of_prompt(flat: Any) -> tuple[float, ...]:
    """The log-probs of a prompt's tokens. vLLM's row of a position begins with its token; the first row is empty."""
    return tuple(flat.logprobs[start] for start in flat.start_indices[1:])


def _most_probable(flat: Any) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    """The rest of each row: the most probable tokens, falling. None if they were not asked for."""
    rows = list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]
    if all(end - start == 1 for start, end in rows):
        return None
    pairs = list(zip(flat.token_ids, flat.logprobs, strict=True))
    return tuple(tuple(pairs[start + 1 : end]) for start, end in rows)
