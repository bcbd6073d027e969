"""Requests that are still running, and what they have sampled so far."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from vllm.v1.engine.llm_engine import LLMEngine

from generator.engine import GenerationEngine
from rl.types import Completion
from tests.waiting import LIMIT_S, until


def run_paced(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test. No engine takes a step before the test's event loop has come round once more.

    So a test that acts while requests run is never too late, however slow or busy the host is. The loop of a test that
    awaits a thread comes round too: `no_steps` holds the engines then.
    """
    asyncio.run(_paced(main))


_HELD = threading.Event()


@contextlib.contextmanager
def no_steps() -> Generator[None]:
    """Within the block, engines of `run_paced` carry out commands and sample nothing."""
    _HELD.set()
    try:
        yield
    finally:
        _HELD.clear()


async def _paced(main: Coroutine[Any, Any, None]) -> None:
    loop, step, over = asyncio.get_running_loop(), LLMEngine.step, threading.Event()

    def step_after_loop(engine: LLMEngine) -> Any:
        came_round = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(came_round.set)
        while not over.is_set() and not came_round.wait(0.01):
            pass
        return [] if _HELD.is_set() else step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "step", step_after_loop)
        try:
            await asyncio.wait_for(main, LIMIT_S)
        finally:
            over.set()


async def started(engine: GenerationEngine, num_tokens: int = 5) -> None:
    """Waits until every running request has sampled some tokens."""
    states: dict[str, Any] = engine.llm.output_processor.request_states
    await until(
        lambda: states and all(s.detokenizer.num_output_tokens() >= num_tokens for s in list(states.values())),
        f"every request to have {num_tokens} tokens",
        every_s=0.001,
    )


def versions_of(completion: Completion) -> dict[int, int]:
    """How many tokens of each version, which never decreases."""
    assert list(completion.versions) == sorted(completion.versions)
    assert len(completion.versions) == len(completion.tokens) == len(completion.logprobs)
    return dict(Counter(completion.versions))
