"""What the endpoint sends to a generator with a request of a session, and what comes back beside the answer."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ownloop_agents.splicing import EarlierCall, How
from rl.types import FinishReason, SamplingParams

SERVING = "agents"
"""The entry point in `ownloop.generators` of the class that captures."""
RECORD = "ownloop-record "
"""What the event of a stream begins with that is the record, and no event of vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """What a generator needs to know of a session to answer its next request."""

    earlier: tuple[EarlierCall, ...]
    """The finished calls, in order."""
    sampling: SamplingParams
    """How the session samples; replaces what the program asks for."""
    repeat: int = 0
    """How many requests of the session had this text before. The seed depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call, as the generator saw it."""

    parent: int | None
    """Index of the earlier call whose tokens the prompt begins with."""
    how: How
    prompt_tokens: tuple[int, ...]
    """The prompt's tokens after the parent's."""
    prompt: str
    """These tokens as text, control tokens included."""
    tokens: tuple[int, ...]
    """[N] the sampled tokens."""
    logprobs: tuple[float, ...]
    """[N]"""
    versions: tuple[int, ...]
    """[N]"""
    text: str
    """The sampled tokens as text, control tokens included."""
    finish_reason: FinishReason
    kept: Sequence[Sequence[int]] | None
    """[N] the tokens that a cut left for each token, as in `Completion.kept`; None if nothing was cut."""
    digest: str
    """Of the conversation with the answer; `EarlierCall.digest`."""
    constrained: bool
    """Whether a form of the answer was forced, by a JSON schema or a tool that must be called. Then the tokens are not
    of the distribution that is trained."""

    def as_json(self) -> str:
        """One line, exact."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CallRecord":
        """The record that `as_json` wrote."""
        read: dict[str, Any] = json.loads(text)
        # JSON has lists alone; the fields are tuples
        lists: dict[str, Any] = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
        return cls(**{**read, **lists})
