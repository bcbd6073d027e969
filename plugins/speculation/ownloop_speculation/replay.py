"""What drafts would have brought to completions. No model runs: a draft is accepted where it is what was sampled."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ownloop_speculation.history import History
from ownloop_speculation.rule import DraftRule
from rl.types import Group


@dataclass(frozen=True, slots=True)
class Request:
    """A completion that was sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    version: int


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
    size: int = 1
    draft: list[int] = field(default_factory=list[int])

    def step(self) -> list[int]:
        """The tokens that a step samples: those of the draft that are right, and one more."""
        rest = self.request.tokens[self.size :]
        accepted = next((i for i, (a, b) in enumerate(zip(self.draft, rest, strict=False)) if a != b), len(self.draft))
        new = list(rest[: accepted + 1])
        self.size += len(new)
        return new

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
                    yield Request(prompt, completion.tokens, completion.versions[-1])
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
            history.extend(run.name, run.request.tokens[:1], run.request.version)
            found.requests += 1
            found.tokens += 1
        num_begun = len(at_work)
        at_work = [run for run in at_work if not _ends(history, run)]
        if num_begun == 0:
            return found
        if len(at_work) < num_begun:  # others may take the places
            continue
        _draft(at_work, history, rule, max_draft, min_chance)
        drafted = sum(len(run.draft) for run in at_work)
        new = {run.name: run.step() for run in at_work}
        for run in at_work:
            history.extend(run.name, new[run.name], run.request.version)
        num_tokens = sum(map(len, new.values()))
        found.requests += len(at_work)
        found.tokens += num_tokens
        found.drafted += drafted
        found.accepted += num_tokens - len(at_work)
        found.seconds += rule.seconds(len(at_work) + drafted, checks=drafted > 0)


def _ends(history: History, run: _Running) -> bool:
    if run.left == 0:
        history.end(run.name)
    return run.left == 0


def _draft(at_work: list[_Running], history: History, rule: DraftRule, max_draft: int, min_chance: float) -> None:
    least, expected = max(min_chance, rule.least_chance(len(at_work))), 0.0
    for run in at_work:
        draft = history.draft(run.name, min(max_draft, run.left - 1) if least < 1 else 0, least)
        run.draft = draft.tokens
        expected += sum(draft.chances)
    if rule.gain(len(at_work), expected, sum(len(run.draft) for run in at_work)) <= 0:
        for run in at_work:
            run.draft = []
