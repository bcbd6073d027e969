"""A generator that notes when each request got a token, in a module that Monarch's processes can import."""

import time
from typing import Any

from monarch.actor import concurrent_endpoint

from generator.actor import VLLMGenerator
from generator.config import GeneratorConfig


class TimedGenerator(VLLMGenerator):
    """`VLLMGenerator`, with a clock read after every step."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Builds the engine."""
        super().__init__(config)
        engine: Any = self._engine
        self._tokens: dict[str, tuple[int, float]] = {}  # request -> how many it had, and when it got the last
        self._gaps: list[tuple[float, float]] = []  # when a token came, and how long after the one before
        step, states = engine._step, engine._engine.output_processor.request_states

        def timed() -> None:
            step()
            now = time.monotonic()
            for request, state in states.items():
                count, last = self._tokens.get(request, (0, now))
                if (new := state.detokenizer.num_output_tokens()) > count:
                    if count:
                        self._gaps.append((now, now - last))
                    self._tokens[request] = (new, now)

        engine._step = timed

    @concurrent_endpoint
    async def gaps(self) -> list[tuple[float, float]]:
        """Of every token but a request's first and last: when it came, and the seconds since the one before."""
        return list(self._gaps)
