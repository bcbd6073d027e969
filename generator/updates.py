"""How a published version is brought into a vLLM engine between two of its steps, on all ranks or on none.

Every rank checks before any loads. All of it runs in the engine's thread; when it may run is the engine's business.
"""

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from generator.pull import Backup, TensorQueue, WeightLoader, queued_tensors
from rl.weights.manifest import VersionRecord, WeightsError


def _nothing() -> None:
    pass


class WeightUpdates:
    """The weights of one vLLM engine: their version, and how it changes."""

    def __init__(self, engine: LLMEngine, group: GroupCoordinator, directory: Path) -> None:
        """`group` are the ranks that share the model, which was loaded from `directory`."""
        self._engine = engine
        self._group = group
        self._loader = WeightLoader(
            engine.model_executor.driver_worker.get_model(),
            directory,
            tied_embeddings=engine.model_config.hf_text_config.tie_word_embeddings,
        )
        self.version = 0
        """Policy version; 0 until the first update: the weights of the model's directory."""
        self.inconsistent: Exception | None = None
        """Why the weights are a mixture of two versions, if they are; nothing may be sampled then."""
        engine.set_weight_version("0")

    def finish_steps(self, step: Callable[[], None]) -> None:
        """Takes the results of what vLLM began ahead of time, as it does on a GPU: they are of the old weights."""
        core: Any = self._engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def apply(self, record: VersionRecord, feed: TensorQueue | None, *, keep_prefix_cache: bool) -> None:
        """Checks on every rank before any of them loads; loads on all. `feed` is rank 0's, where TorchStore carries.

        Requests in progress keep their tokens. What was computed for them under the old weights is computed again
        under the new ones, unless `keep_prefix_cache`. Raises what `WeightLoader` raises; `inconsistent` holds
        the error if the old weights are not whole any more.
        """
        problem: Exception | None = None
        with contextlib.ExitStack() as stack:
            load: Callable[[], None] = _nothing
            backup: Backup | None = None
            try:
                self._loader.check(record)
                if record.transport == "shared_memory":
                    buffer = stack.enter_context(self._loader.shared_memory(record))
                    load = partial(self._loader.load_buffer, buffer, record)
                else:
                    backup = self._loader.backup() if self.inconsistent is None else None
                    tensors = stack.enter_context(contextlib.closing(self._from_rank_zero(feed)))
                    load = partial(self._loader.load, tensors)
            except Exception as error:
                problem = error
            self._raise_on_every_rank(problem)
            try:
                load()
            except Exception as error:
                problem = error
        try:
            self._raise_on_every_rank(problem)
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

    def _from_rank_zero(self, feed: TensorQueue | None) -> Generator[tuple[str, torch.Tensor]]:
        """Rank 0's tensors on every rank, one at a time. Closing it early still brings the broadcasts to their end."""
        if feed is not None:
            try:
                for item in queued_tensors(feed):
                    self._group.broadcast_object(item)
                    yield item
            finally:
                self._group.broadcast_object(None)
        else:
            item = self._group.broadcast_object()
            try:
                while item is not None:
                    yield item
                    item = self._group.broadcast_object()
            finally:
                while item is not None:
                    item = self._group.broadcast_object()

    def _raise_on_every_rank(self, problem: Exception | None) -> None:
        """Raises on all ranks if one has a problem, so that they go on to do the same."""
        problems: list[str | None] = [str(problem) if problem else None]
        if self._group.world_size > 1:
            problems = [None] * self._group.world_size
            dist.all_gather_object(problems, str(problem) if problem else None, group=self._group.cpu_group)
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise WeightsError(f"generator rank {rank} could not take the weights in: {text}")
