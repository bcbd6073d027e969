"""What drafts would have brought to completions. No model runs: a draft is accepted where it is what was sampled."""

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
    seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a request in a step."""
        return self.tokens / max(1, self.requests)


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
    requests: Iterable[Request], history: History, rule: DraftRule, *, running: int, max_draft: int, min_chance: float
) -> Replayed:
    """Counts the steps of requests of which `running` run at a time, in their order. Prompts cost nothing here.

    The first token of a request comes with its prompt, as in an engine.
    """
    waiting, at_work, found = iter(enumerate(requests)), list[_Running](), Replayed()
    while True:
        while len(at_work) < running and (each := next(waiting, None)) is not None:
            at_work.append(run := _Running(f"{id(found)}-{each[0]}", each[1]))
            history.begin(run.name, run.request.prompt)
            found.requests += 1
            found.tokens += run.step(history)
        num_begun = len(at_work)
        at_work = [run for run in at_work if not _ends(history, run)]
        if num_begun == 0:
            return found
        if len(at_work) < num_begun:  # others may take the places
            continue
        looks = max_draft > 0 and rule.is_worth_a_look(len(at_work))
        longest = {run.name: min(max_draft, run.left - 1) for run in at_work}
        drafts = propose(history, rule, longest, min_chance, _MOST_ROWS) if looks else [[] for _ in at_work]
        for run, draft in zip(at_work, drafts, strict=True):
            run.draft = draft
        drafted, num_running = sum(map(len, drafts)), len(at_work)
        num_tokens = sum(run.step(history) for run in at_work)
        found.requests += num_running
        found.tokens += num_tokens
        found.drafted += drafted
        found.accepted += num_tokens - num_running
        found.seconds += rule.seconds(num_running + drafted, checks=drafted > 0)
        if looks:
            saved = rule.gain(num_running, num_tokens - num_running, drafted) if drafted else 0.0
            found.seconds += rule.look * num_running
            rule.observe_look(num_running, saved, rule.look * num_running)


def _ends(history: History, run: _Running) -> bool:
    if run.left == 0:
        history.end(run.name)
    return run.left == 0
