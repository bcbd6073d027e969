"""What drafts would have brought to completions. No model runs: a draft is accepted where it is what was sampled."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ownloop_speculation.history import History
from ownloop_speculation.rule import DraftRule, propose
from rl.types import Group

_MOST_ROWS = 2048
"""vLLM's default."""


@dataclass(frozen=True, slots=True)
class Request:
    """A completion that was sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    version: int
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Replayed:
    """What a replay counts."""

    requests: int = 0
    """A request in a step, which without drafts is a token."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    """Those that the prefix cache did not have."""
    seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a request in a step."""
        return self.tokens / max(1, self.requests)

    def count(self, rule: DraftRule, num_running: int, num_tokens: int, drafted: int) -> None:
        """Adds a step, beside what its prompts and the look before it cost."""
        self.requests += num_running
        self.tokens += num_tokens
        self.drafted += drafted
        self.accepted += num_tokens - num_running
        self.seconds += rule.seconds(num_running + drafted, checks=drafted > 0)
        rule.observe_tokens(num_running, drafted, num_tokens)


class PrefixCache:
    """What vLLM's prefix cache has of prompts: whole blocks, of one version of the weights. Nothing is evicted."""

    def __init__(self, block_size: int) -> None:
        """Is empty. `block_size` is in tokens."""
        self._block_size = block_size
        self._blocks = set[int]()

    def add(self, request: Request) -> int:
        """Adds what a request computes. Returns how many tokens of its prompt were not there."""
        tokens, size, block = request.prompt + request.tokens[:-1], self._block_size, hash(request.version)
        num_cached = 0
        for end in range(size, len(tokens) + 1, size):
            block = hash((block, tokens[end - size : end]))
            if num_cached == end - size and end < len(request.prompt) and block in self._blocks:
                num_cached = end
            self._blocks.add(block)
        return len(request.prompt) - num_cached


@dataclass(slots=True)
class _Running:
    name: str
    request: Request
    size: int = 0
    draft: list[int] = field(default_factory=list[int])

    def step(self, history: History) -> int:
        """Samples the tokens of a step: those of the draft that are right, and one more. Returns how many."""
        rest = self.request.tokens[self.size :]
        accepted = next((i for i, (a, b) in enumerate(zip(self.draft, rest, strict=False)) if a != b), len(self.draft))
        begun, self.size = self.size, self.size + accepted + 1
        logprobs = self.request.logprobs[begun : self.size]
        history.extend(self.name, rest[: accepted + 1], self.request.version, logprobs)
        return accepted + 1

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.size


def requests_of(groups: Iterable[Group]) -> Iterator[Request]:
    """The requests of recorded groups, each turn of a rollout for itself."""
    for group in groups:
        for rollout in group.rollouts:
            prompt: tuple[int, ...] = ()
            for turn in rollout.turns:
                prompt += turn.prompt_tokens
                completion = turn.completion
                if completion.tokens:
                    yield Request(prompt, completion.tokens, completion.versions[-1], completion.logprobs)
                prompt += completion.tokens


def replay(
    requests: Iterable[Request],
    history: History,
    rule: DraftRule,
    prefixes: PrefixCache,
    *,
    running: int,
    max_draft: int,
    min_chance: float,
) -> Replayed:
    """Counts the steps of requests of which `running` run at a time, in their order, and the seconds that they cost.

    As in an engine, a step computes the prompts of the requests that begin, and samples the first token of each.
    """
    waiting, at_work, found, looked = iter(enumerate(requests)), list[_Running](), Replayed(), 0
    while True:
        new = list(itertools.islice(waiting, running - len(at_work)))
        at_work += (_Running(f"{id(found)}-{number}", request) for number, request in new)
        if not at_work:
            return found
        for run in at_work[len(at_work) - len(new) :]:
            history.begin(run.name, run.request.prompt)
        computed = sum(prefixes.add(request) for _, request in new)
        drafted, num_running = sum(len(run.draft) for run in at_work), len(at_work)
        num_tokens = sum(run.step(history) for run in at_work)
        found.count(rule, num_running, num_tokens, drafted)
        found.prompt_tokens += computed
        found.seconds += rule.prompt * (computed - len(new)) + rule.look * looked
        if looked:
            saved = rule.gain(num_running, num_tokens - num_running, drafted) if drafted else 0.0
            rule.observe_look(num_running, saved, rule.look * looked)
        at_work = [run for run in at_work if not _ends(history, run)]
        looked = len(at_work) if max_draft and at_work and rule.is_worth_a_look(len(at_work)) else 0
        longest = {run.name: min(max_draft, run.left - 1) for run in at_work}
        drafts = propose(history, rule, longest, min_chance, _MOST_ROWS) if looked else [[] for _ in at_work]
        for run, draft in zip(at_work, drafts, strict=True):
            run.draft = draft


def _ends(history: History, run: _Running) -> bool:
    if run.left == 0:
        history.end(run.name)
    return run.left == 0
