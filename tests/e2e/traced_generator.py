"""A generator's rank that notes its own calls, those of its engine's thread too. The processes import this module."""

import sys
from typing import Any

from monarch.actor import concurrent_endpoint

from generator.actor import VLLMGenerator
from tests.call_tracing import TracedCall, Tracer

FOLDERS = ("rl", "generator", "controller")


class TracedGenerator(VLLMGenerator):
    """`VLLMGenerator` whose later pulls are traced."""

    _tracer = Tracer(*FOLDERS)

    @concurrent_endpoint
    async def trace(self) -> None:
        """Traces this thread from now on, and the engine's while it loads weights."""
        updates: Any = self._engine._updates  # pyright: ignore[reportPrivateUsage]
        apply = updates.apply

        def traced(*args: Any, **options: Any) -> None:
            self._tracer.start()
            try:
                apply(*args, **options)
            finally:
                sys.setprofile(None)

        updates.apply = traced
        self._tracer.start()

    @concurrent_endpoint
    async def traced(self) -> list[TracedCall]:
        """The calls since then."""
        self._tracer.stop()
        return self._tracer.calls
