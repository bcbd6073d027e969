"""How tokens are sampled, and which tokens a cut of the vocabulary (top-k, top-p, min-p) has kept for each of them.

The log-prob of a token is that among its kept tokens. Legend: N tokens, K kept tokens of all of them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from rl.configuration import Rare, Seed, Several, configuration

Ids = np.ndarray
"""uint16, which is enough for most sets, or int32."""
MAX_TOPK_LOGPROBS = 20
"""vLLM's own bound of `SamplingParams.topk_prompt_logprobs`, unless `engine_args` say otherwise."""
DEFAULT_TOP_K = 512
"""The most tokens that are kept where something else than `SamplingParams.top_k` cuts the distribution."""


def _check_temperature(value: float) -> float:
    if value != 0 and not 0.01 <= value <= 2:
        raise ValueError("Input should be 0, or from 0.01 to 2")
    return value


@configuration
class SamplingParams:
    """How the generator samples. Log-probs always belong to the distribution that was sampled from."""

    max_tokens: PositiveInt
    """The largest number of tokens to sample, at least 1."""
    temperature: Annotated[float, AfterValidator(_check_temperature)] = 1.0
    """0 samples greedily. Else from 0.01 to 2: vLLM refuses a higher one, and takes 0.01 for a lower one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the most probable tokens whose probabilities add up to at least this value; 1 keeps all tokens."""
    top_k: Literal[-1] | PositiveInt = -1
    """Samples from this many of the most probable tokens; -1 keeps the whole vocabulary. Where `top_p` or `min_p`
    alone cuts, 512 are left at most, which bounds what has to be recorded of every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Samples from the tokens that are at least this times as probable as the most probable one; 0 keeps all."""
    stop: Several[Annotated[str, Field(min_length=1)]] = ()
    """Strings that end a completion. Their tokens stay in the completion."""
    stop_token_ids: Rare[Several[NonNegativeInt]] = ()
    """Tokens that end a completion, in addition to the model's own end token. They stay in the completion."""
    ignore_eos: Rare[bool] = False
    """Whether the model's own end token does not end a completion."""
    seed: Rare[Seed | None] = None
    """Sample i of a call uses seed + i. With None, every call draws a new seed."""
    prompt_logprobs: Rare[bool] = False
    """Also returns log-probs of the prompt's tokens. The prefix cache is then not used for the prompt."""
    topk_prompt_logprobs: Rare[Annotated[int, Field(ge=-1, le=MAX_TOPK_LOGPROBS)]] = 0
    """As `prompt_logprobs`, of so many most probable tokens at every position too, at most 20; -1 stands for all
    tokens, which the option `max_logprobs` of vLLM has to allow. Not recorded."""

    @property
    def most_kept(self) -> int:
        """The most tokens that one is sampled from, -1 for the whole vocabulary: `top_k`, or 512."""
        return DEFAULT_TOP_K if self.top_k == -1 and (self.top_p < 1 or self.min_p > 0) else self.top_k

    @property
    def cuts(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.most_kept != -1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of the prompt are asked for."""
        return self.prompt_logprobs or self.topk_prompt_logprobs != 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """N sets of tokens, one after the other. An empty set stands for the whole vocabulary: nothing was cut off."""

    ids: Ids
    """[K] the tokens, rising within each set."""
    starts: NDArray[np.int64]
    """[N + 1] where each set begins in `ids`, and the end of the last one."""

    @classmethod
    def whole(cls, size: int) -> "KeptSets":
        """`size` sets that stand for the whole vocabulary."""
        return cls(np.zeros(0, np.uint16), np.zeros(size + 1, np.int64))

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | Ids]) -> "KeptSets":
        """Makes them of sets whose tokens rise."""
        counts = [len(each) for each in sets]
        ids = np.concatenate([np.asarray(each, np.int64) for each in sets]) if any(counts) else np.zeros(0, np.int64)
        return cls(ids, np.cumsum([0, *counts], dtype=np.int64)).compact()

    @classmethod
    def joined(cls, parts: Sequence["KeptSets"]) -> "KeptSets":
        """The sets of all parts, in order."""
        counts = np.concatenate([part.counts for part in parts])
        return cls(np.concatenate([part.ids for part in parts]), _starts(counts))

    def __len__(self) -> int:
        """N."""
        return len(self.starts) - 1

    def __eq__(self, other: object) -> bool:
        """Whether all sets are the same."""
        if not isinstance(other, KeptSets):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        """The hash of the tokens."""
        return hash((self.ids.astype(np.int64).tobytes(), self.starts.tobytes()))

    @property
    def counts(self) -> NDArray[np.int64]:
        """[N] the number of tokens in each set."""
        return np.diff(self.starts)

    def take(self, indices: NDArray[np.int64]) -> "KeptSets":
        """The sets with these indices."""
        counts = self.counts[indices]
        starts = _starts(counts)
        places = np.arange(starts[-1]) + np.repeat(self.starts[indices] - starts[:-1], counts)
        return KeptSets(self.ids[places], starts)

    def part(self, start: int, stop: int) -> "KeptSets":
        """The sets `start` to `stop - 1`."""
        starts = self.starts[start : stop + 1]
        return KeptSets(self.ids[starts[0] : starts[-1]], starts - starts[0])

    def compact(self) -> "KeptSets":
        """The same sets with ids of the smaller of the two dtypes that holds them."""
        return KeptSets(self.ids.astype(np.uint16 if self.ids.max(initial=0) < 1 << 16 else np.int32), self.starts)

    def numbers(self) -> NDArray[np.int64]:
        """[N] a number for each set; the same ones have the same number."""
        seen = dict[bytes, int]()
        sets = (self.ids[start:stop].tobytes() for start, stop in pairwise(self.starts.tolist()))
        return np.array([seen.setdefault(each, len(seen)) for each in sets], dtype=np.int64)

    def fault(self, targets: NDArray[np.int64], vocab_size: int) -> str:
        """What is wrong with these sets for tokens [N] that were sampled from them; empty if nothing is."""
        if len(self) != len(targets):
            return f"has {len(self)} sets; there are {len(targets)} tokens"
        if self.ids.dtype.name not in ("uint16", "int32"):
            return f"has ids of dtype {self.ids.dtype}; they must be uint16 or int32"
        if self.starts[0] != 0 or self.starts[-1] != len(self.ids) or (self.counts < 0).any():
            return f"has starts that do not rise from 0 to the number of its ids, {len(self.ids)}"
        ids, owners = self.ids.astype(np.int64), np.repeat(np.arange(len(self)), self.counts)
        if len(wrong := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
            return f"has the token {ids[wrong[0]]}; token ids are between 0 and {vocab_size - 1}"
        if len(wrong := np.flatnonzero((np.diff(ids) <= 0) & (np.diff(owners) == 0))):
            return f"has a set, at {owners[wrong[0]]}, whose tokens do not rise"
        found = np.bincount(owners[ids == targets[owners]], minlength=len(self))
        if len(wrong := np.flatnonzero((self.counts > 0) & (found == 0))):
            return f"has a set, at {wrong[0]}, without the token {targets[wrong[0]]} that was sampled from it"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts that each layer of a mixture chose for the tokens that a completion was computed from.

    Legend: P tokens of the prompt, N of the completion, k experts of a token.
    """

    prompt: Ids
    """[P, layers, k] the same array for all completions of a call, so that it is sent once."""
    sampled: Ids
    """[N - 1, layers, k], because the last token is not computed from."""

    def __eq__(self, other: object) -> bool:
        """Whether all experts are the same."""
        if not isinstance(other, Routes):
            return NotImplemented
        return np.array_equal(self.prompt, other.prompt) and np.array_equal(self.sampled, other.sampled)

    def __hash__(self) -> int:
        """The hash of the experts of sampled tokens."""
        return hash(self.sampled.tobytes())


def routes_fault(routes: Ids, num_tokens: int, experts: tuple[int, int, int]) -> str:
    """What is wrong with the experts of a datum's tokens; empty if nothing is.

    `experts` are the model's layers, the experts of a token, and those to choose from.
    """
    num_layers, per_token, num_experts = experts
    if routes.shape != (expected := (num_tokens, num_layers, per_token)):
        return f"has shape {routes.shape}; {expected} is expected: tokens, layers, experts of a token"
    if routes.dtype.name not in ("uint8", "uint16"):
        return f"has dtype {routes.dtype}; it must be uint8 or uint16"
    if routes.max(initial=0) >= num_experts:
        return f"has the expert {routes.max()}; experts are between 0 and {num_experts - 1}"
    ordered = np.sort(routes, axis=-1)
    if len(twice := np.argwhere(ordered[..., 1:] == ordered[..., :-1])):
        return f"has the expert {ordered[tuple(twice[0])]} twice, at position {twice[0][0]} in layer {twice[0][1]}"
    return ""


def joined_routes(parts: Sequence[Ids | None]) -> Ids | None:
    """The experts of all parts, in order; None if no part has any. `validate_batch` refuses a batch of both kinds."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None


def padded_routes(routes: Ids | None, count: int) -> Ids | None:
    """With experts for so many more tokens, different ones, because a layer counts a repeated expert only once."""
    if routes is None:
        return None
    experts = np.arange(routes.shape[2], dtype=routes.dtype)
    return np.concatenate([routes, np.broadcast_to(experts, (count, *routes.shape[1:]))])


def after_prompt(prompt: Sequence[int], kept: KeptSets) -> KeptSets:
    """The kept sets of a datum's targets: of the prompt's tokens but the first, and of a completion's."""
    return KeptSets.joined([KeptSets.whole(len(prompt) - 1), kept])


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
