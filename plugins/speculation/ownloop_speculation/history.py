"""Drafts from what was sampled before: completions of the same prompt, finished ones and those that are running.

A draft decides how many tokens one step checks, never which tokens are sampled. So nothing here can make a token wrong.

All completions of a prompt are one array of tokens in which a negative number stands before each completion. A draft
follows the longest contexts that occur in it, at most 16 tokens: of the tokens that came after them, the one of the
largest chances, then of what came after both, and so on. Each token that a context is shorter than the longest makes it
count less. A token's chance is that with which it was sampled.
Where only a short context occurs, a longer one is looked for in the newest completions of all prompts. A finished
completion takes 5 bytes a token; the prompt is kept as a digest of 16 bytes.
"""

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np
from numpy.typing import NDArray

from ownloop_speculation.search import LONGEST, START, UNKNOWN, Chances, Place, Text, Tokens, vote

_ENOUGH = 2
"""Tokens of a context. Only where fewer occur, other prompts' completions are searched."""
_NUM_RECENT = 8192
"""The newest tokens of all prompts, which are searched then."""
_NUM_VERSIONS = 3
"""Weight versions whose completions of a prompt are kept."""
_MAX_TOKENS_OF_PROMPT = 1 << 16
"""A draft compares its context with all of them, which takes 20 microseconds."""
_PROMPT = -2
"""What stands before the prompt."""
_LEARNING_RATE = 0.05
"""At the first guess. After n it is divided by the root of 1 + n / 100, so that chances settle and still follow."""


@dataclass(slots=True)
class Draft:
    """Tokens that may come next."""

    tokens: list[int]
    chances: list[float]
    """The estimated chance that a token and all before it are sampled; falling."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """The completions of a prompt of which one runs."""

    tokens: Tokens
    past: Tokens
    """Finished completions, each behind -1 - its version."""
    past_chances: Chances
    running: "list[_Running]" = field(default_factory=list["_Running"])
    known: Text | None = None
    """The finished completions and the prompt; None when one has finished since."""
    text: Text | None = None
    """These and what runs; None when tokens have come since."""

    def search(self, context: Sequence[int], most: int) -> list[Place]:
        """See `Text.find`."""
        if self.known is None:
            unknown = np.full(len(self.tokens), UNKNOWN, dtype=np.uint8)
            self.known = Text([(np.maximum(self.past, START), self.past_chances), (self.tokens, unknown)])
        if self.text is None:
            self.text = self.known.followed_by([run.as_arrays() for run in self.running])
        return self.text.find(context, most)


@dataclass(slots=True, eq=False)
class _Running:
    """A completion that grows."""

    prompt: _Prompt
    key: bytes
    tokens: "array[int]" = field(default_factory=lambda: array("i", [START]))
    """`START` and the tokens so far."""
    chances: bytearray = field(default_factory=lambda: bytearray([UNKNOWN]))
    version: int = 0
    """That of the weights which sampled the last token."""
    guesses: list[tuple[int, list[float]]] = field(default_factory=list[tuple[int, list[float]]])
    """The tokens that the last draft considered, and what their chances were estimated by."""

    def as_arrays(self) -> tuple[Tokens, Chances]:
        """The tokens and their chances. The completion cannot grow while one of them lives."""
        return np.frombuffer(self.tokens, dtype=np.int32), np.frombuffer(self.chances, dtype=np.uint8)


class Calibration:
    """The chance that a guess is right: logistic regression, which learns from every guess that was checked."""

    def __init__(self) -> None:
        """Begins with what was fitted to answers of SmolLM2-135M to 8 questions."""
        self._weights = [-1.8, 0.5, 0.5, 0.4, 0.3, -0.6]
        self._num_seen = 0

    def features(self, context: int, seen: float, chance: float, agreed: float, *, foreign: bool) -> list[float]:
        """Of a guess that `vote` has made from places of a context of so many tokens, which count `seen` together.

        `foreign` says that the places are in completions of other prompts.
        """
        return [1.0, _log_odds(chance), _log_odds(agreed), math.log(context), math.log(seen), float(foreign)]

    def chance(self, features: Sequence[float]) -> float:
        """The estimated chance of such a guess."""
        return 1 / (1 + math.exp(-sum(map(mul, self._weights, features))))

    def observe(self, features: Sequence[float], *, hit: bool) -> None:
        """Counts a guess: a step of stochastic gradient descent."""
        step = _LEARNING_RATE / math.sqrt(1 + self._num_seen / 100) * (hit - self.chance(features))
        self._num_seen += 1
        self._weights = [w + step * x for w, x in zip(self._weights, features, strict=True)]


class History:
    """Completions by prompt, and drafts from them. Bounded by a number of tokens."""

    def __init__(self, *, max_tokens: int, own_only: bool = False) -> None:
        """Keeps at most `max_tokens` of finished completions. With `own_only` none: a draft is from its own request."""
        self._max_tokens = max_tokens
        self._own_only = own_only
        # Tokens and chances by the prompt's digest, the newest last.
        self._at_rest: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._num_at_rest = 0
        self._prompts: dict[bytes, _Prompt] = {}
        self._running: dict[str, _Running] = {}
        self._calibration = Calibration()
        self._recent = Text([])

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of finished completions by prompt, and one more for each completion."""
        return self._num_at_rest + sum(len(each.past) for each in self._prompts.values())

    @property
    def running(self) -> set[str]:
        """The names of the requests that have begun and not ended."""
        return set(self._running)

    def begin(self, request: str, prompt: Sequence[int] | Tokens) -> None:
        """Notes that a completion of this prompt begins."""
        tokens = np.ascontiguousarray(prompt, dtype=np.int32)
        key = request.encode() if self._own_only else hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
        if key not in self._prompts:
            past, chances = self._at_rest.pop(key, (b"", b""))
            self._num_at_rest -= len(chances)
            self._prompts[key] = _Prompt(
                np.concatenate(([_PROMPT], tokens), dtype=np.int32),
                np.frombuffer(past, dtype=np.int32),
                np.frombuffer(chances, dtype=np.uint8),
            )
        self._running[request] = run = _Running(self._prompts[key], key)
        run.prompt.running.append(run)

    def num_tokens(self, request: str) -> int:
        """Tokens of a completion so far."""
        return len(self._running[request].tokens) - 1

    def extend(
        self, request: str, tokens: Sequence[int], version: int, logprobs: Sequence[float] | None = None
    ) -> None:
        """Appends tokens that were sampled, by this version of the weights, and their log-probs if they are known."""
        run = self._running[request]
        run.version = version
        run.tokens.extend(tokens)
        chances = (
            [UNKNOWN] * len(tokens) if logprobs is None else [round(255 * math.exp(min(0.0, x))) for x in logprobs]
        )
        run.chances.extend(chances)
        run.prompt.text = None
        for (guessed, features), token in zip(run.guesses, tokens, strict=False):
            self._calibration.observe(features, hit=guessed == token)
            if guessed != token:
                break
        run.guesses = []

    def end(self, request: str) -> None:
        """Keeps a completion, under the version that sampled its last token."""
        run = self._running.pop(request)
        prompt = run.prompt
        prompt.running.remove(run)
        prompt.known = prompt.text = None
        if not self._own_only:
            self._recent = self._recent.followed_by([run.as_arrays()], most=_NUM_RECENT)
            run.tokens[0] = -1 - run.version
            past = np.concatenate((prompt.past, np.frombuffer(run.tokens, dtype=np.int32)))
            kept = _newest(past)
            prompt.past = past[kept]
            chances = np.concatenate((prompt.past_chances, np.frombuffer(run.chances, dtype=np.uint8)))
            prompt.past_chances = chances[kept]
        if not prompt.running:
            del self._prompts[run.key]
            if len(prompt.past):
                self._at_rest[run.key] = prompt.past.tobytes(), prompt.past_chances.tobytes()
                self._num_at_rest += len(prompt.past)
        while self._at_rest and self.num_kept_tokens > self._max_tokens:
            self._num_at_rest -= len(self._at_rest.popitem(last=False)[1][1])

    def draft(self, request: str, most: int, least: float) -> Draft:
        """At most `most` tokens that may come next, while the chance of all of them is at least `least`."""
        run, draft, chance = self._running[request], Draft([], []), 1.0
        places, foreign = self._search(run, most)
        run.guesses = []
        while places and len(draft.tokens) < most:
            depth = len(draft.tokens)
            token, likely, agreed, seen = vote(places, depth)
            if token < 0:  # it ended here
                break
            context = min(places[-1][0] + depth, LONGEST)
            features = self._calibration.features(context, seen, likely, agreed, foreign=foreign)
            run.guesses.append((token, features))
            chance *= self._calibration.chance(features)
            if chance < least:
                break
            draft.tokens.append(token)
            draft.chances.append(chance)
            places = [place for place in places if place[1][depth] == token]
        return draft

    def _search(self, run: _Running, most: int) -> tuple[list[Place], bool]:
        """The places at which a completion's end occurs, and whether they are in completions of other prompts."""
        if not most:
            return [], False
        context = run.tokens[-LONGEST:]
        places = run.prompt.search(context, most)
        length = places[-1][0] if places else 0
        if length < _ENOUGH and not self._own_only:
            foreign = self._recent.find(context, most)
            if foreign and foreign[-1][0] > length:
                return foreign, True
        return places, False


def _log_odds(chance: float) -> float:
    chance = min(max(chance, 0.02), 0.98)
    return math.log(chance / (1 - chance))


def _newest(past: Tokens) -> NDArray[np.bool_]:
    """Which tokens are kept: those of the newest versions, and of these the newest that are not too many."""
    starts = np.flatnonzero(past < 0)
    versions = -1 - past[starts]
    oldest = np.unique(versions)[-_NUM_VERSIONS:][0]
    sizes = np.diff(starts, append=len(past))
    behind = sizes[::-1].cumsum()[::-1]  # tokens of a completion and all that came after it
    kept = (versions >= oldest) & ((behind <= _MAX_TOKENS_OF_PROMPT) | (starts == starts[-1]))
    return np.repeat(kept, sizes)
