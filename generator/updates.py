"""Brings a published version into a vLLM engine between two of its steps, on all ranks or on none.

Every rank checks the version before any rank loads it. Everything but `feed` runs in the engine's thread; when an
update may run is the engine's business.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import ModelConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from generator.config import GeneratorConfig
from generator.policies import ServedPolicy, unknown_policy
from generator.pull import Backup, WeightLoader
from generator.served_adapters import Adapters
from rl.lora import Policy
from rl.weights.ranks import raise_on_every_rank
from rl.weights.transport import TRANSPORTS, Feed, WeightMemory, load_transport
from rl.weights.versions import Store, VersionRecord

_CANNOT_LOAD = "generator rank {rank} could not take the weights in"


def _is_tied(config: ModelConfig) -> bool:
    """Whether the output layer is the embedding matrix, which `GeneratorConfig.check_model` has compared."""
    # Where the files repeat the matrix, vLLM loads the model as untied and ties it afterwards.
    return config.hf_text_config.tie_word_embeddings or config.word_embeddings_untied_by_checkpoint


def _nothing() -> None:
    pass


class WeightUpdates:
    """The weights of one vLLM engine, of the model itself and of its adapters: their versions, and how they change."""

    def __init__(self, engine: LLMEngine, group: GroupCoordinator, config: GeneratorConfig) -> None:
        """`group` holds the ranks that share the model."""
        self._engine = engine
        self._group = group
        self._receivers = {name: load_transport(name).receiver(group.broadcast_object) for name in TRANSPORTS}
        self._loader = WeightLoader(
            engine.model_executor.driver_worker.get_model(),
            config.model,
            tied_embeddings=_is_tied(engine.model_config),
        )
        self._num_updates = 0
        self.model = ServedPolicy(None, version=0, update=0)
        """The model itself. Version 0 stands for the weights of the model's directory."""
        self.adapters = None if config.lora is None else Adapters(engine, config.lora, self._loader.shapes)
        self.inconsistent: Exception | None = None
        """The error that left a mixture of two versions, if there is one; nothing may be sampled then."""
        engine.set_weight_version("0")

    def find(self, policy: Policy) -> ServedPolicy:
        """What is served under this name. Raises ValueError if there is nothing."""
        if policy is None:
            return self.model
        if self.adapters is None:
            raise unknown_policy(policy, (None,))
        return self.adapters.find(policy)

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

    def rest(self, step: Callable[[], None], *, asleep: bool) -> None:
        """Frees the memory of weights, keys and values, or takes it again. The weights are kept on the host.

        vLLM has nothing to free on a CPU, and only says so.
        """
        if not asleep:
            self._engine.wake_up()
            return
        self.finish_steps(step)
        self._engine.sleep(level=1)

    def feed(self, record: VersionRecord, store: Store) -> Feed | None:
        """What rank 0's event loop has to run during `apply`, if anything."""
        return self._receivers[record.transport].feed(record, store)

    def apply(self, record: VersionRecord, feed: Feed | None, *, frozen: bool, keep_prefix_cache: bool) -> None:
        """Checks the version on every rank, then loads it on every rank. `feed` is rank 0's.

        Requests in progress keep their tokens. Their keys and values are computed again under the new weights, unless
        `keep_prefix_cache`. Raises what the transport's `Receiver`, `WeightLoader` and `Adapters` raise; `inconsistent`
        holds the error if the old weights could not be kept.
        """
        if record.policy is None:
            self._load_model(record, feed)
            if not keep_prefix_cache:
                self._engine.reset_prefix_cache(reset_running_requests=True)
            self.model.replace(record.version, self._next_update())
        else:
            self._load_adapter(record, feed, frozen=frozen, keep_prefix_cache=keep_prefix_cache)

    def freeze(self, name: str, version: int) -> bool:
        """See `Adapters.freeze`."""
        return self.adapters is not None and self.adapters.freeze(name, version, self._next_update())

    def drop(self, policy: Policy) -> None:
        """See `Adapters.drop`."""
        if self.adapters is None:
            raise unknown_policy(policy, (None,))
        self.adapters.drop(policy)

    def free_dropped(self) -> None:
        """See `Adapters.free_dropped`."""
        if self.adapters is not None:
            self.adapters.free_dropped()

    def _next_update(self) -> int:
        """The number of an update. Tokens that are sampled from now on come after it."""
        self._num_updates += 1
        self._engine.set_weight_version(str(self._num_updates))
        return self._num_updates

    def _load_adapter(self, record: VersionRecord, feed: Feed | None, *, frozen: bool, keep_prefix_cache: bool) -> None:
        adapters = self.adapters
        assert adapters is not None
        model = problem = None
        try:
            self._loader.check_dtype(record)
            adapters.check(record, frozen=frozen)
            with self._receivers[record.transport].open(record, feed) as weights:
                # The adapter outlives the memory in which it was published.
                if isinstance(weights, WeightMemory):
                    tensors = {spec.name: weights.tensor(spec).clone() for spec in record.manifest}
                else:
                    tensors = {name: tensor.clone() for name, tensor in weights}
            model = adapters.build(record, tensors)
        except Exception as error:
            problem = error
        raise_on_every_rank(problem, _CANNOT_LOAD, self._group.cpu_group)
        assert model is not None
        adapters.serve(record, model, self._next_update(), frozen=frozen, keep_prefix_cache=keep_prefix_cache)

    def _load_model(self, record: VersionRecord, feed: Feed | None) -> None:
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
