"""Drafts from what was sampled before: completions of the same prompt, finished ones and those that are running.

A draft decides how many tokens one step checks, never which tokens are sampled. So nothing here can make a token wrong.

All completions of a prompt are one array of tokens in which a negative number stands before each completion. A draft
follows the longest context that occurs in it, at most `_LONGEST` tokens: of the tokens that came after it, the
one of the largest chances, then of what came after both, and so on. A token's chance is that with which it was sampled.
A finished completion takes 5 bytes a token; the prompt is kept as a digest of 16 bytes.
"""

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Chances = NDArray[np.uint8]
"""0 stands for 0 and 255 for 1."""

_LONGEST = 16
_MAX_PLACES = 64
"""The newest places of a context that are looked at."""
_UNKNOWN = 178
"""The chance of what was not sampled, and of a token without a log-prob: 0.7."""
_NUM_VERSIONS = 3
"""Weight versions whose completions of a prompt are kept."""
_MAX_TOKENS_OF_PROMPT = 1 << 16
"""A draft compares its context with all of them, which takes 20 microseconds."""
_START, _PROMPT = -1, -2
"""What stands before a completion, so that its start is a context too; and before the prompt."""
_LEARNING_RATE = 0.005


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
    text: tuple[Tokens, Chances] | None = None
    """Everything that a context is looked for in; None when tokens have come since."""


@dataclass(slots=True, eq=False)
class _Running:
    """A completion that grows."""

    prompt: _Prompt
    key: bytes
    tokens: "array[int]" = field(default_factory=lambda: array("i", [_START]))
    """`_START` and the tokens so far. It cannot grow while there is a view of it."""
    chances: bytearray = field(default_factory=lambda: bytearray([_UNKNOWN]))
    version: int = 0
    """That of the weights which sampled the last token."""
    guesses: list[tuple[int, list[float]]] = field(default_factory=list[tuple[int, list[float]]])
    """The tokens that the last draft considered, and what their chances were estimated by."""


class Calibration:
    """The chance that a guess is right: logistic regression, which learns from every guess that was checked."""

    def __init__(self) -> None:
        """Begins with what was fitted to answers of SmolLM2-135M to grade-school problems."""
        self._weights = [-1.5, 0.4, 0.55, 0.4, 0.2]

    def features(self, context: int, seen: int, times: int, chance: float) -> list[float]:
        """Of a guess that followed `times` of the `seen` times that a context of so many tokens was found.

        `chance` is the mean of what its chance was, or was at most, at these places.
        """
        return [1.0, _log_odds(chance), _log_odds((times + 0.5) / (seen + 1)), math.log(context), math.log(seen)]

    def chance(self, features: Sequence[float]) -> float:
        """The estimated chance of such a guess."""
        return 1 / (1 + math.exp(-sum(w * x for w, x in zip(self._weights, features, strict=True))))

    def observe(self, features: Sequence[float], *, hit: bool) -> None:
        """Counts a guess: a step of stochastic gradient descent."""
        step = _LEARNING_RATE * (hit - self.chance(features))
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

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of finished completions, and one more for each completion."""
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
            [_UNKNOWN] * len(tokens) if logprobs is None else [round(255 * math.exp(min(0.0, x))) for x in logprobs]
        )
        run.chances.extend(chances)
        run.prompt.text = None
        for (guess, features), token in zip(run.guesses, tokens, strict=False):
            self._calibration.observe(features, hit=guess == token)
            if guess != token:
                break
        run.guesses = []

    def end(self, request: str) -> None:
        """Keeps a completion, under the version that sampled its last token."""
        run = self._running.pop(request)
        prompt = run.prompt
        prompt.running.remove(run)
        prompt.text = None
        if not self._own_only:
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
        run = self._running[request]
        if run.prompt.text is None:
            run.prompt.text = _text_of(run.prompt)
        (text, chances), context = run.prompt.text, run.tokens[-_LONGEST:]
        places, length = _find(text, context)
        draft, chance = Draft([], []), 1.0
        run.guesses = []
        while length > 0 and len(draft.tokens) < most:
            places = places[-_MAX_PLACES:]
            guess, times, mean = _guess(text[places].tolist(), chances[places].tolist())
            if guess < 0:  # it ended here
                break
            features = self._calibration.features(length, len(places), times, mean)
            run.guesses.append((guess, features))
            chance *= self._calibration.chance(features)
            if chance < least:
                break
            draft.tokens.append(guess)
            draft.chances.append(chance)
            places = places[text[places] == guess] + 1
            length = min(length + 1, _LONGEST)
        return draft


def _guess(following: Sequence[int], chances: Sequence[int]) -> tuple[int, int, float]:
    """The token of the largest chances, how often it followed, and the mean of what its chance was or was at most."""
    sums, counts = dict[int, int](), dict[int, int]()
    for token, chance in zip(reversed(following), reversed(chances), strict=True):  # of equals, the newest
        sums[token] = sums.get(token, 0) + chance
        counts[token] = counts.get(token, 0) + 1
    guess = max(sums, key=sums.__getitem__)
    total, mean = float(sums[guess]), sums[guess] / counts[guess]
    if len(sums) > 1:  # where another token was sampled, this one had at most the rest
        total += sum(
            min(mean, 255 - chance) for token, chance in zip(following, chances, strict=True) if token != guess
        )
    return guess, counts[guess], total / len(following) / 255


def _log_odds(chance: float) -> float:
    chance = min(max(chance, 0.02), 0.98)
    return math.log(chance / (1 - chance))


def _text_of(prompt: _Prompt) -> tuple[Tokens, Chances]:
    """Everything that a context may occur in, the newest last. It ends with a start, so that every token has a next."""
    tokens = (np.frombuffer(run.tokens, dtype=np.int32) for run in prompt.running)
    chances = (np.frombuffer(run.chances, dtype=np.uint8) for run in prompt.running)
    of_prompt = np.full(len(prompt.tokens), _UNKNOWN, dtype=np.uint8)
    of_end = np.full(1, _UNKNOWN, dtype=np.uint8)
    return (
        np.concatenate((np.maximum(prompt.past, _START), prompt.tokens, *tokens, [_START]), dtype=np.int32),
        np.concatenate((prompt.past_chances, of_prompt, *chances, of_end)),
    )


def _find(text: Tokens, context: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """The places in a text behind the longest end of a context that is found there; and the length of that end."""
    places = np.flatnonzero(text[:-1] == context[-1]) + 1
    places = places[text[places] >= 0]
    length = 1 if len(places) else 0
    while 0 < length < len(context):
        before = places - length - 1
        longer = places[(text[before] == context[-1 - length]) & (before >= 0)]
        if not len(longer):
            break
        places, length = longer, length + 1
    return places, length


def _newest(past: Tokens) -> NDArray[np.bool_]:
    """Which tokens are kept: those of the newest versions, and of these the newest that are not too many."""
    starts = np.flatnonzero(past < 0)
    versions = -1 - past[starts]
    oldest = np.unique(versions)[-_NUM_VERSIONS:][0]
    sizes = np.diff(starts, append=len(past))
    behind = sizes[::-1].cumsum()[::-1]  # tokens of a completion and all that came after it
    kept = (versions >= oldest) & ((behind <= _MAX_TOKENS_OF_PROMPT) | (starts == starts[-1]))
    return np.repeat(kept, sizes)
