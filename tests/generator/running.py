"""Requests that are still running, and what they have sampled so far."""

import asyncio
from collections import Counter
from typing import Any

from generator.engine import GenerationEngine
from rl.types import Completion


async def started(engine: GenerationEngine, num_tokens: int = 5) -> None:
    """Waits until every running request has sampled some tokens."""
    states: dict[str, Any] = engine._engine.output_processor.request_states  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(60):
        while not states or any(s.detokenizer.num_output_tokens() < num_tokens for s in list(states.values())):
            await asyncio.sleep(0.001)


def versions_of(completion: Completion) -> dict[int, int]:
    """How many tokens of each version, which never decreases."""
    assert list(completion.versions) == sorted(completion.versions)
    assert len(completion.versions) == len(completion.tokens) == len(completion.logprobs)
    return dict(Counter(completion.versions))
