"""Drafts from what was sampled before: completions of the same prompt, finished ones and those that are running.

A draft decides how many tokens one step checks, never which tokens are sampled. So nothing here can make a token wrong.

All completions of a prompt are one array of tokens in which a negative number stands before each completion. A draft
follows the longest context that occurs in it, at most `_LONGEST` tokens: of the tokens that came after it, the most
frequent one, then of what came after both, and so on. A finished completion takes 4 bytes a token; the prompt is kept
as a digest of 16 bytes.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

_LONGEST = 16
_SHORTEST = 2
"""A context of one token says too little."""
_NUM_VERSIONS = 3
"""Weight versions whose completions of a prompt are kept."""
_MAX_TOKENS_OF_PROMPT = 1 << 16
"""A draft compares its context with all of them, which takes 20 microseconds."""
_START, _PROMPT = -1, -2
"""What stands before a completion, so that its start is a context too; and before the prompt."""
_PRIOR = 4.0
"""Observations that the share in what was seen counts for."""


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
    running: "list[_Running]" = field(default_factory=list["_Running"])
    text: Tokens | None = None
    """Everything that a context is looked for in; None when tokens have come since."""


@dataclass(slots=True, eq=False)
class _Running:
    """A completion that grows."""

    prompt: _Prompt
    key: bytes
    tokens: "array[int]" = field(default_factory=lambda: array("i", [_START]))
    """`_START` and the tokens so far. It cannot grow while there is a view of it."""
    version: int = 0
    """That of the weights which sampled the last token."""
    guesses: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list[tuple[int, tuple[int, int, int]]])
    """The tokens that the last draft considered, and what their chances were estimated by."""


class Calibration:
    """How often guesses were right, by the length of their context, how often it was seen, and the guess's share."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._tries = np.zeros((5, 6, 5))
        self._hits = np.zeros((5, 6, 5))

    def of(self, context: int, seen: int, share: float) -> tuple[int, int, int]:
        """Where such guesses are counted."""
        return min(context.bit_length() - 1, 4), min(seen.bit_length() - 1, 5), min(int(5 * share), 4)

    def chance(self, place: tuple[int, int, int], share: float) -> float:
        """The estimated chance of such a guess."""
        return float((self._hits[place] + _PRIOR * share) / (self._tries[place] + _PRIOR))

    def observe(self, place: tuple[int, int, int], *, hit: bool) -> None:
        """Counts a guess. The newest 500 of a kind count."""
        if self._tries[place] >= 500:
            self._tries[place] *= 0.9
            self._hits[place] *= 0.9
        self._tries[place] += 1
        self._hits[place] += hit


class History:
    """Completions by prompt, and drafts from them. Bounded by a number of tokens."""

    def __init__(self, *, max_tokens: int, own_only: bool = False) -> None:
        """Keeps at most `max_tokens` of finished completions. With `own_only` none: a draft is from its own request."""
        self._max_tokens = max_tokens
        self._own_only = own_only
        self._at_rest: OrderedDict[bytes, bytes] = OrderedDict()  # by the prompt's digest, the newest last
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
            past = np.frombuffer(self._at_rest.pop(key, b""), dtype=np.int32)
            self._num_at_rest -= len(past)
            self._prompts[key] = _Prompt(np.concatenate(([_PROMPT], tokens), dtype=np.int32), past)
        self._running[request] = run = _Running(self._prompts[key], key)
        run.prompt.running.append(run)

    def num_tokens(self, request: str) -> int:
        """Tokens of a completion so far."""
        return len(self._running[request].tokens) - 1

    def extend(self, request: str, tokens: Sequence[int], version: int) -> None:
        """Appends tokens that were sampled, by this version of the weights."""
        run = self._running[request]
        run.version = version
        run.tokens.extend(tokens)
        run.prompt.text = None
        for (guess, place), token in zip(run.guesses, tokens, strict=False):
            self._calibration.observe(place, hit=guess == token)
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
            prompt.past = _newest(np.concatenate((prompt.past, np.frombuffer(run.tokens, dtype=np.int32))))
        if not prompt.running:
            del self._prompts[run.key]
            if len(prompt.past):
                self._at_rest[run.key] = prompt.past.tobytes()
                self._num_at_rest += len(prompt.past)
        while self._at_rest and self.num_kept_tokens > self._max_tokens:
            self._num_at_rest -= len(self._at_rest.popitem(last=False)[1]) // 4

    def draft(self, request: str, most: int, least: float) -> Draft:
        """At most `most` tokens that may come next, while the chance of all of them is at least `least`."""
        run = self._running[request]
        if run.prompt.text is None:
            run.prompt.text = _text_of(run.prompt)
        text, context = run.prompt.text, np.array(run.tokens[-_LONGEST:], dtype=np.int32)
        places, length = _find(text, context)
        draft, chance = Draft([], []), 1.0
        run.guesses = []
        while length >= _SHORTEST and len(draft.tokens) < most:
            following = text[places].tolist()
            guess, count = Counter(reversed(following)).most_common(1)[0]  # of equals, the newest
            if guess < 0:  # it ended here
                break
            share = count / (len(following) + 0.5)
            place = self._calibration.of(length, len(following), share)
            run.guesses.append((guess, place))
            chance *= self._calibration.chance(place, share)
            if chance < least:
                break
            draft.tokens.append(guess)
            draft.chances.append(chance)
            places = places[text[places] == guess] + 1
            length = min(length + 1, _LONGEST)
        return draft


def _text_of(prompt: _Prompt) -> Tokens:
    """Everything that a context may occur in, the newest last. It ends with a start, so that every token has a next."""
    running = (np.frombuffer(run.tokens, dtype=np.int32) for run in prompt.running)
    return np.concatenate((np.maximum(prompt.past, _START), prompt.tokens, *running, [_START]), dtype=np.int32)


def _find(text: Tokens, context: Tokens) -> tuple[NDArray[np.int64], int]:
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


def _newest(past: Tokens) -> Tokens:
    """The completions of the newest versions, and of these the newest that are not too many."""
    starts = np.flatnonzero(past < 0)
    versions = -1 - past[starts]
    oldest = np.unique(versions)[-_NUM_VERSIONS:][0]
    sizes = np.diff(starts, append=len(past))
    behind = sizes[::-1].cumsum()[::-1]  # tokens of a completion and all that came after it
    kept = (versions >= oldest) & ((behind <= _MAX_TOKENS_OF_PROMPT) | (starts == starts[-1]))
    return past if kept.all() else past[np.repeat(kept, sizes)]
