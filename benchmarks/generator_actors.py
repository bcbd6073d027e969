"""Generators that tell more about themselves, in a module that Monarch's processes can import."""

import time
from typing import Any

from monarch.actor import concurrent_endpoint

from generator.actor import VLLMGenerator
from generator.config import GeneratorConfig


class PackingGenerator(VLLMGenerator):
    """`VLLMGenerator` that knows whether its pulls pack weights or only copy them."""

    @concurrent_endpoint
    async def packs_weights(self) -> bool:
        """Whether vLLM multiplies with packed copies of the weights in this dtype on this CPU."""
        from generator.cpu.weight_packing import packed_layers

        engine: Any = self._engine
        return bool(packed_layers(engine._engine.model_executor.driver_worker.get_model()))


class TimedGenerator(VLLMGenerator):
    """`VLLMGenerator` that notes, after every step, which requests got a token."""

    def __init__(self, config: GeneratorConfig, store_name: str) -> None:
        """Builds the engine."""
        super().__init__(config, store_name)
        engine: Any = self._engine
        self._tokens: dict[str, tuple[int, float]] = {}  # request -> its number of tokens, and when the last one came
        self._gaps: list[tuple[float, float]] = []  # when a token came, and the seconds since the one before
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
        """For every token but a request's first and last: when it came, and the seconds since the token before."""
        return list(self._gaps)
