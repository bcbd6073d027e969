"""A trainer's rank that notes its own calls. In a module of its own: the processes import it."""

from monarch.actor import endpoint

from tests.call_tracing import TracedCall, Tracer
from trainer.actor import PolicyTrainer

FOLDERS = ("rl", "trainer", "controller")


class TracedTrainer(PolicyTrainer):
    """`PolicyTrainer` whose later calls are traced."""

    _tracer = Tracer(*FOLDERS)

    @endpoint
    async def trace(self) -> None:
        """Traces this process's thread from now on."""
        self._tracer.start()

    @endpoint
    async def traced(self) -> list[TracedCall]:
        """The calls since then."""
        self._tracer.stop()
        return self._tracer.calls
