"""Brings a published version into a vLLM engine between two of its steps, on all ranks or on none.

Every rank checks the version before any rank loads it. Everything but `feed` runs in the engine's thread; when an
update may run is the engine's business.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from generator.pull import Backup, WeightLoader
from rl.weights.manifest import VersionRecord
from rl.weights.ranks import raise_on_every_rank
from rl.weights.transport import TRANSPORTS, Feed, WeightMemory, load_transport
from rl.weights.version_index import Store

_CANNOT_LOAD = "generator rank {rank} could not take the weights in"


def _nothing() -> None:
    pass


class WeightUpdates:
    """The weights of one vLLM engine: their version, and how it changes."""

    def __init__(self, engine: LLMEngine, group: GroupCoordinator, directory: Path) -> None:
        """`group` holds the ranks that share the model, which was loaded from `directory`."""
        self._engine = engine
        self._group = group
        self._receivers = {name: load_transport(name).receiver(group.broadcast_object) for name in TRANSPORTS}
        self._loader = WeightLoader(
            engine.model_executor.driver_worker.get_model(),
            directory,
            tied_embeddings=engine.model_config.hf_text_config.tie_word_embeddings,
        )
        self.version = 0
        """Policy version; 0, which stands for the weights of the model's directory, until the first update."""
        self.inconsistent: Exception | None = None
        """The error that left a mixture of two versions, if there is one; nothing may be sampled then."""
        engine.set_weight_version("0")

    def finish_steps(self, step: Callable[[], None]) -> None:
        """Waits for the steps that vLLM has begun ahead of time, as it does on a GPU: they use the old weights."""
        core: Any = self._engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def feed(self, record: VersionRecord, store: Store) -> Feed | None:
        """What rank 0's event loop has to run during `apply`, if anything."""
        return self._receivers[record.transport].feed(record, store)

    def apply(self, record: VersionRecord, feed: Feed | None, *, keep_prefix_cache: bool) -> None:
        """Checks the version on every rank, then loads it on every rank. `feed` is rank 0's.

        Requests in progress keep their tokens. Their keys and values are computed again under the new weights, unless
        `keep_prefix_cache`. Raises what the transport's `Receiver` and `WeightLoader` raise; `inconsistent` holds the
        error if the old weights could not be kept.
        """
        problem: Exception | None = None
        with contextlib.ExitStack() as stack:
            load: Callable[[], None] = _nothing
            backup: Backup | None = None
            try:
                self._loader.check(record)
                weights = stack.enter_context(self._receivers[record.transport].open(record, feed))
                if isinstance(weights, WeightMemory):
                    load = partial(self._loader.load_memory, weights, record)
                else:  # tensors may fail to arrive after the first of them was loaded
                    backup = self._loader.backup() if self.inconsistent is None else None
                    load = partial(self._loader.load, weights)
            except Exception as error:
                problem = error
            raise_on_every_rank(problem, _CANNOT_LOAD, self._group.cpu_group)
            try:
                load()
            except Exception as error:
                problem = error
        try:
            raise_on_every_rank(problem, _CANNOT_LOAD, self._group.cpu_group)
        except Exception as error:
            if backup is not None:
                self._loader.restore(backup)
            else:
                self.inconsistent = error
            raise
        self.inconsistent = None
        if not keep_prefix_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(record.version))
        self.version = record.version
