"""Brings a published version into a vLLM engine between two of its steps, on all ranks or on none.

`WeightUpdates` holds the versions of the model itself. `Adapters` holds the versions of its adapters (LoRA), and loads
them from memory, replaces them under running requests, freezes and drops them. Every rank checks a version before any
rank loads it. Everything runs in the engine's thread, at a time that the engine chooses.

vLLM keeps the prefix cache of a prompt under an adapter's name, and loaded weights under an adapter's number. An old
name or number would silently bring back old weights, so every version gets a new name and a new number. vLLM moves
registered adapters into and out of its slots by itself.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from generator._compat import patch_prompt_logprobs
from generator.config import GeneratorConfig, LoRALimits
from generator.conversion import ServedPolicy, unknown_policy
from generator.pull import Backup, WeightLoader
from rl.lora import LoRAConfig, Policy, adapted_modules, tensor_name
from rl.weights.memory import WeightBuffer
from rl.weights.version import (
    Fetch,
    VersionRecord,
    WeightsMismatchError,
    load_transport,
    raise_on_every_rank,
    transports,
)

_STAY = ("gpu_memory", "shared_memory")
"""Transports whose versions can be read several times, with nothing to fetch."""
_CANNOT_LOAD = "generator rank {rank} could not take the weights in"


class WeightUpdates:
    """The weights of one vLLM engine, of the model itself and of its adapters: their versions, and how they change."""

    def __init__(self, engine: LLMEngine, group: GroupCoordinator, config: GeneratorConfig) -> None:
        """`group` holds the ranks that share the model."""
        self._engine = engine
        self._group = group
        self._receivers = {name: load_transport(name).receiver(group.broadcast_object) for name in transports()}
        model, settings = engine.model_executor.driver_worker.get_model(), engine.model_config
        # Where the files repeat the embedding matrix, vLLM loads the model as untied and ties it afterwards.
        tied: bool = settings.hf_config.tie_word_embeddings or settings.word_embeddings_untied_by_checkpoint
        self._loader = WeightLoader(model, config.model, tied_embeddings=tied)
        self._num_updates = 0
        self._pulled: VersionRecord | None = None  # the version in the model, if it can be had again
        self._dropped: VersionRecord | None = None  # the version that a sleep has dropped
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

    def sleep(self, step: Callable[[], None]) -> None:
        """Frees the memory of weights, keys and values.

        Weights that can be pulled again are dropped, and other weights are kept in the host's memory. vLLM has nothing
        to free on a CPU, and only says so.
        """
        self.finish_steps(step)
        # Adapters lie in the memory that would be dropped.
        self._dropped = self._pulled if self.adapters is None else None
        self._loader.frozen_id = b""
        self._engine.sleep(level=1 if self._dropped is None else 2)

    def load_dropped(self) -> None:
        """Loads the weights that a sleep has dropped, for a request that comes before the next pull."""
        if self._dropped is None:
            return
        record = self._dropped
        try:
            self._load_model(record, None)
        except Exception as error:  # the trainer has published two versions since
            self._dropped, self.inconsistent = None, error

    def apply(self, record: VersionRecord, fetch: Fetch | None, *, frozen: bool, keep_prefix_cache: bool) -> None:
        """Checks the version on every rank, then loads it on every rank. `fetch` is rank 0's.

        Requests in progress keep their tokens. Their keys and values are computed again under the new weights, unless
        `keep_prefix_cache`. Raises what the transport's `Receiver`, `WeightLoader` and `Adapters` raise; `inconsistent`
        holds the error if the old weights could not be kept.
        """
        if record.policy is None:
            self._load_model(record, fetch)
            if not keep_prefix_cache:
                self._engine.reset_prefix_cache(reset_running_requests=True)
                if self._engine.model_config.is_multimodal_model:
                    self._engine.engine_core.reset_encoder_cache()
            self.model.replace(record.version, self._next_update())
        else:
            self._load_adapter(record, fetch, frozen=frozen, keep_prefix_cache=keep_prefix_cache)

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

    def _load_adapter(
        self, record: VersionRecord, fetch: Fetch | None, *, frozen: bool, keep_prefix_cache: bool
    ) -> None:
        adapters = self.adapters
        assert adapters is not None
        model = problem = None
        try:
            self._loader.check_dtype(record)
            adapters.check(record, frozen=frozen)
            with self._receivers[record.transport].open(record, fetch) as weights:
                # The adapter outlives the memory in which it was published.
                if isinstance(weights, WeightBuffer):
                    tensors = {spec.name: weights.tensor(spec).clone() for spec in record.manifest}
                else:
                    tensors = {name: tensor.clone() for name, tensor in weights}
            model = adapters.build(record, tensors)
        except Exception as error:
            problem = error
        raise_on_every_rank(problem, _CANNOT_LOAD, self._group.cpu_group)
        assert model is not None
        adapters.serve(record, model, self._next_update(), frozen=frozen, keep_prefix_cache=keep_prefix_cache)

    def _load_model(self, record: VersionRecord, fetch: Fetch | None) -> None:
        problem: Exception | None = None
        with contextlib.ExitStack() as stack:
            load: Callable[[], None] | None = None
            weights: Any = None
            backup: Backup | None = None
            try:
                self._loader.check(record)
                weights = stack.enter_context(self._receivers[record.transport].open(record, fetch))
                if isinstance(weights, WeightBuffer):
                    load = partial(self._loader.load_memory, weights, record)
                else:  # tensors may fail to arrive after the first of them was loaded
                    usable = self.inconsistent is None and self._dropped is None
                    backup = self._loader.backup() if usable else None
                    load = partial(self._loader.load, weights)
            except Exception as error:
                problem = error
            raise_on_every_rank(problem, _CANNOT_LOAD, self._group.cpu_group)
            assert load is not None
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
        self.inconsistent = self._dropped = None
        self._pulled = record if isinstance(weights, WeightBuffer) and record.transport in _STAY else None


class Adapters:
    """The live and frozen adapters of one rank's engine."""

    def __init__(self, engine: LLMEngine, limits: LoRALimits, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are of the model's own tensors, by their Hugging Face names."""
        self._limits = limits
        self._shapes = shapes
        self._scheduler: Any = engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
        worker: Any = engine.model_executor.driver_worker
        self._runner = getattr(worker, "worker", worker).model_runner
        patch_prompt_logprobs(self._runner)
        self._manager = self._runner.lora_manager._adapter_manager
        self._adaptable = set(_adaptable(self._manager))
        self._mapper: Any = getattr(self._runner.model, "hf_to_vllm_mapper", None)
        self._served: dict[Policy, ServedPolicy] = {}
        self._dropped: list[int] = []  # numbers of adapters that requests may still use
        self._numbers = itertools.count(1)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The names of the adapters, and the frozen versions."""
        return tuple(self._served)

    def find(self, policy: Policy) -> ServedPolicy:
        """What is served under this name. Raises ValueError if there is nothing."""
        if policy not in self._served:
            raise unknown_policy(policy, (None, *self._served))
        return self._served[policy]

    def freeze(self, name: str, version: int, update: int) -> bool:
        """Keeps the newest version as `(name, version)`, if that is its number. Returns whether it is kept now."""
        live = self._served.get(name)
        if (name, version) in self._served:
            return True
        if live is None or live.version != version:
            return False
        self._check_room()
        # The copy shares its tensors with the original, and they are never written to.
        model = self._manager.get_adapter(live.lora_request.lora_int_id).clone(next(self._numbers))
        self._add((name, version), model, version, update)
        return True

    def check(self, record: VersionRecord, *, frozen: bool) -> None:
        """Raises ValueError if this generator cannot take this version in."""
        assert record.policy is not None
        if record.lora is None:
            raise ValueError(f"version {record.version} of {record.policy!r} was published without its LoRAConfig")
        if record.lora.rank > self._limits.max_rank:
            raise ValueError(
                f"{record.policy!r} has rank {record.lora.rank}; this generator takes ranks of at most"
                f" {self._limits.max_rank} (LoRALimits.max_rank)"
            )
        self._check_modules(record, record.lora)
        if frozen or record.policy not in self._served:
            self._check_room()

    def build(self, record: VersionRecord, tensors: dict[str, torch.Tensor]) -> LoRAModel:
        """An adapter in vLLM's form, not served yet. vLLM keeps `tensors` and scales them in place."""
        assert record.lora is not None
        helper = PEFTHelper(r=record.lora.rank, lora_alpha=record.lora.alpha, target_modules=[])  # pyright: ignore[reportArgumentType]
        return LoRAModel.from_lora_tensors(
            next(self._numbers),
            tensors,
            helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=self._mapper if self._has_other_names(record) else None,
        )

    def serve(
        self, record: VersionRecord, model: LoRAModel, update: int, *, frozen: bool, keep_prefix_cache: bool
    ) -> None:
        """Serves a version: next to the newest one if `frozen`, otherwise in its place, also for running requests.

        Running requests keep their tokens. Their keys and values are computed again, unless `keep_prefix_cache`.
        """
        policy: Policy = (record.policy, record.version) if frozen else record.policy
        live = self._served.get(policy)
        if live is None:
            self._add(policy, model, record.version, update)
        elif keep_prefix_cache:
            # The same name and number mean for vLLM that what was computed before is still good.
            model.id = live.lora_request.lora_int_id
            self._manager.remove_adapter(model.id)
            self._manager.add_adapter(model)
            live.replace(record.version, update, live.lora_request)
        else:
            old = live.lora_request.lora_int_id
            self._manager.add_adapter(model)
            live.replace(record.version, update, _request(policy, model))
            self._move_requests(old, live.lora_request)
            self._manager.remove_adapter(old)

    def drop(self, policy: Policy) -> None:
        """Serves a policy no longer. Its memory is freed once its last request has ended."""
        served = self.find(policy)
        del self._served[policy]
        self._dropped.append(served.lora_request.lora_int_id)
        self.free_dropped()

    def free_dropped(self) -> None:
        """Frees dropped adapters that no request uses any more."""
        if self._dropped:
            used = {each.lora_request.lora_int_id for each in self._scheduler.requests.values() if each.lora_request}
            for number in set(self._dropped) - used:
                self._manager.remove_adapter(number)
            self._dropped = [number for number in self._dropped if number in used]

    def _add(self, policy: Policy, model: LoRAModel, version: int, update: int) -> None:
        self._manager.add_adapter(model)
        self._served[policy] = ServedPolicy(policy, version, update, _request(policy, model))

    def _check_room(self) -> None:
        if len(self._served) + len(self._dropped) >= self._limits.max_loaded:
            ending = f", {len(self._dropped)} of them dropped but still in use" if self._dropped else ""
            raise ValueError(
                f"this generator holds {self._limits.max_loaded} adapters and frozen versions{ending}; drop one, or"
                " raise LoRALimits.max_loaded"
            )

    def _check_modules(self, record: VersionRecord, config: LoRAConfig) -> None:
        """Raises `WeightsMismatchError` unless the tensors are A and B of projections that can be adapted here."""
        expected: dict[str, tuple[int, ...]] = {}
        modules = adapted_modules(spec.name for spec in record.manifest)
        if foreign := sorted(name for name in modules if not self._adaptable & {name, self._name_in_vllm(name)}):
            raise WeightsMismatchError(f"{record.policy!r} adapts {foreign[0]}, which this generator cannot adapt")
        for module in modules:
            num_out, num_in = self._shapes[f"{module}.weight"]
            expected[tensor_name(module, "A")] = (config.rank, num_in)
            expected[tensor_name(module, "B")] = (num_out, config.rank)
        found = {spec.name: spec.shape for spec in record.manifest}
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                raise WeightsMismatchError(
                    f"{record.policy!r} does not fit this model: {name} is {found.get(name)} instead of"
                    f" {expected.get(name)}"
                )

    def _has_other_names(self, record: VersionRecord) -> bool:
        """Whether vLLM has other names for the adapted modules, as it has for gpt-oss.

        A mapper alone does not say so: most mappers merge projections, which `_adaptable` has apart.
        """
        modules = adapted_modules(spec.name for spec in record.manifest)
        return self._mapper is not None and not self._adaptable.issuperset(modules)

    def _name_in_vllm(self, module: str) -> str:
        """vLLM's name of a module with this Hugging Face name."""
        return module if self._mapper is None else self._mapper._map_name(f"{module}.weight").removesuffix(".weight")

    def _move_requests(self, number: int, to: LoRARequest) -> None:
        """Continues requests under another adapter. Their keys and values are computed again."""

        def theirs(requests: Iterable[Any]) -> list[Any]:
            return [each for each in requests if each.lora_request and each.lora_request.lora_int_id == number]

        for request in reversed(theirs(self._scheduler.running)):  # each is put at the head of the waiting ones
            self._scheduler.running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        for request in theirs(self._scheduler.requests.values()):
            request.lora_request = to
            for image in request.mm_features:  # under this name vLLM keeps its features
                image.identifier = f"{to.lora_name}:{image.mm_hash}"
            request.block_hashes.clear()
            request.update_block_hashes()
        for state in theirs(getattr(self._runner, "requests", {}).values()):  # the runner's own notes of them
            state.lora_request = to


def _request(policy: Policy, model: LoRAModel) -> LoRARequest:
    return LoRARequest(f"{policy}@{model.id}", model.id, "memory")


def _adaptable(manager: Any) -> Iterable[str]:
    """The Hugging Face names of the projections that vLLM can adapt; vLLM fuses some of them."""
    for module in manager.modules:
        yield from manager.packed_modules.get(module, (module,))
