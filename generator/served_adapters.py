"""The adapters (LoRA) of a vLLM engine: loaded from memory, replaced under running requests, frozen and dropped.

vLLM keeps what it computed of a prompt under an adapter's name, and what it loaded under an adapter's number. Weights
that go by an old name or number are therefore silently those of before, so every version gets a new name and a new
number. vLLM moves registered adapters into and out of its slots by itself.

Everything runs in the engine's thread, between two steps, in the same way on every rank.
"""

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from generator.config import LoRALimits
from generator.cpu.patches import patch_prompt_logprobs
from generator.policies import ServedPolicy, unknown_policy
from rl.lora import LoRAConfig, Policy, adapted_modules, tensor_name
from rl.weights.manifest import VersionRecord, WeightsMismatchError


class Adapters:
    """The live and frozen adapters of one rank's engine."""

    def __init__(self, engine: LLMEngine, limits: LoRALimits, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are those of the model's own tensors, by their Hugging Face names."""
        self._limits = limits
        self._shapes = shapes
        self._scheduler: Any = engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
        worker: Any = engine.model_executor.driver_worker
        self._runner = getattr(worker, "worker", worker).model_runner
        patch_prompt_logprobs(self._runner)
        self._manager = self._runner.lora_manager._adapter_manager
        self._adaptable = set(_adaptable(self._manager))
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
            next(self._numbers), tensors, helper, device="cpu", dtype=self._manager.lora_config.lora_dtype
        )

    def serve(
        self, record: VersionRecord, model: LoRAModel, update: int, *, frozen: bool, keep_prefix_cache: bool
    ) -> None:
        """Serves a version: beside the newest one if `frozen`, otherwise in its place, also for running requests.

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
        if foreign := sorted(set(modules) - self._adaptable):
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

    def _move_requests(self, number: int, to: LoRARequest) -> None:
        """Has requests go on under another adapter. What was computed of them is computed again."""

        def theirs(requests: Iterable[Any]) -> list[Any]:
            return [each for each in requests if each.lora_request and each.lora_request.lora_int_id == number]

        for request in reversed(theirs(self._scheduler.running)):  # each is put at the head of the waiting ones
            self._scheduler.running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self._scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        for request in theirs(self._scheduler.requests.values()):
            request.lora_request = to
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
