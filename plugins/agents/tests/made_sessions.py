"""Sessions of random tokens, in the shape that programs give them."""

from typing import Any

import numpy as np

from ownloop_agents.sessions import ModelCall, Session
from rl.types import Completion, SamplingParams, Turn

SAMPLING = SamplingParams(max_tokens=64)


def call(parent: int | None, prompt: list[int], sampled: list[int], **more: Any) -> ModelCall:
    """A call that read `prompt` after its parent's tokens."""
    logprobs = tuple(np.linspace(-4, -3, len(sampled)).tolist())
    completion = Completion(
        tokens=tuple(sampled), logprobs=logprobs, versions=(3,) * len(sampled), text="", finish_reason="stop"
    )
    how = "root" if parent is None else "spliced"
    return ModelCall(
        turn=Turn(prompt_tokens=tuple(prompt), completion=completion, prompt="said"),
        parent=parent,
        how=how,
        digest=str(len(prompt)),
        **more,
    )


def session(*calls: ModelCall, reward: float = 1.0, name: str = "s") -> Session:
    """A session of these calls."""
    return Session(id=name, calls=calls, sampling=SAMPLING, reward=reward)


def branched(seed: int = 0, vocab_size: int = 64) -> Session:
    """Five branches: a history that goes three ways, a compaction, and a sub-agent with a history of its own."""
    rng = np.random.default_rng(seed)

    def some(count: int) -> list[int]:
        return rng.integers(3, vocab_size, count).tolist()

    opening = some(12)
    return session(
        call(None, opening, some(6)),
        call(0, some(5), some(7)),
        call(0, some(4), some(8)),
        call(None, some(9), some(3), label="sub-agent"),
        call(0, some(4), some(6)),
        call(1, some(3), some(5)),
        call(3, some(2), some(4), label="sub-agent"),
        call(None, [*opening, *some(6)], some(5)),
    )
