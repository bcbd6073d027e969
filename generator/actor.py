"""`VLLMGenerator`: one tensor-parallel rank of a generator, in a process of its own. The engine does the sampling."""

import asyncio
import functools
from collections.abc import Sequence
from pkgutil import resolve_name

import torch
import torchstore
from monarch.actor import Actor, concurrent_endpoint

from generator.config import GeneratorConfig
from generator.engine_calls import EngineStatus
from generator.openai_calls import OpenAICall, OpenAIRequests
from rl.lora import LivePolicy, Policy
from rl.system.disk import OwnedFolder
from rl.system.hardware import Heap, import_and_freeze, without_garbage_collection
from rl.system.hf_config import find_family, read_config
from rl.types import Completion, PullMode, SamplingParams
from rl.weights.store import find_record
from rl.weights.version import VersionRecord, WeightsError


class VLLMGenerator(Actor):
    """The endpoints of one rank. Every call goes to rank 0; the engines of the other ranks follow rank 0's."""

    def __init__(self, config: GeneratorConfig, store_name: str | None = None) -> None:
        """Builds the engine, which takes seconds. `options.generator_env` must be the process's environment.

        Versions are pulled from the TorchStore that is named `store_name`.
        """
        model = read_config(config.model)
        if (family := find_family(model)) is not None and family.prepare_process:
            resolve_name(family.prepare_process)(model["architectures"][0])
        # Imported here, because the controller imports this module too and vLLM takes seconds to import.
        import_and_freeze("generator.engine")
        from generator.engine import GenerationEngine

        with without_garbage_collection(), _temporary().takes_temporary_files():
            self._engine = GenerationEngine(config)
        self._store_name = store_name
        self._store_timeout_s = config.deadlines.at_least_s
        self._heap = None if torch.cuda.is_available() else Heap()
        self._openai = OpenAIRequests(self._engine)
        self._calls: dict[str, asyncio.Task[list[Completion]]] = {}

    @concurrent_endpoint
    async def start(self) -> None:
        """Answers once the engine is built."""

    @concurrent_endpoint
    async def generate(
        self, call_id: str, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int, policy: Policy
    ) -> list[Completion]:
        """`GenerationEngine.generate`. `call_id` names the call for `cancel`."""
        call = asyncio.create_task(self._engine.generate(prompt_tokens, sampling, num_samples, policy=policy))
        self._calls[call_id] = call
        try:
            return await call
        except asyncio.CancelledError:
            raise RuntimeError("the call was cancelled") from None
        finally:
            del self._calls[call_id]

    @concurrent_endpoint
    async def openai(self, call_id: str, call: OpenAICall) -> tuple[int, str | None]:
        """`OpenAIRequests.begin`."""
        return await self._openai.begin(call_id, call)

    @concurrent_endpoint
    async def openai_events(self, call_id: str) -> str | None:
        """`OpenAIRequests.next_event`."""
        return await self._openai.next_event(call_id)

    @concurrent_endpoint
    async def cancel(self, call_id: str) -> None:
        """Cancels a call to `generate` or `openai`, if it is still running, or ends its stream."""
        if call_id in self._calls:
            self._calls[call_id].cancel()
        self._openai.cancel(call_id)

    @concurrent_endpoint
    async def pull_model_state_dict(
        self,
        version: int,
        record: VersionRecord | None,
        policy: LivePolicy,
        frozen: bool,
        mode: PullMode,
        keep_prefix_cache: bool,
    ) -> dict[str, float]:
        """Loads exactly this published version; `rl.protocols.Generator` describes the options.

        `record` is the version's. If it is None, TorchStore is asked for it. Returns the `EngineLoad` since the last
        pull.
        """
        if frozen and policy is not None and await self._engine.freeze(policy, version):
            return {}
        if self._store_name is None:
            raise WeightsError("this generator was started without a weight store to pull from")
        try:
            async with asyncio.timeout(self._store_timeout_s):
                store = await torchstore.client(self._store_name)
                if record is None:
                    record = await find_record(store, version, policy)
        except TimeoutError:
            raise WeightsError(f"TorchStore did not answer within {self._store_timeout_s:g} s") from None
        await self._engine.update_weights(record, store, frozen=frozen, mode=mode, keep_prefix_cache=keep_prefix_cache)
        if self._heap is not None:
            self._heap.after_step()
        return self._engine.load.take()

    @concurrent_endpoint
    async def sleep(self) -> None:
        """`GenerationEngine.sleep`."""
        await self._engine.sleep()

    @concurrent_endpoint
    async def wake_up(self) -> None:
        """`GenerationEngine.wake_up`."""
        await self._engine.wake_up()

    @concurrent_endpoint
    async def drop_policy(self, policy: Policy) -> None:
        """`GenerationEngine.drop_policy`."""
        await self._engine.drop_policy(policy)

    @concurrent_endpoint
    async def version(self) -> int:
        """Policy version of the weights in use; 0 before the first pull."""
        return self._engine.version

    @concurrent_endpoint
    async def status(self) -> EngineStatus:
        """`GenerationEngine.status`."""
        return self._engine.status()

    @concurrent_endpoint
    async def num_unfinished(self) -> int:
        """Samples that are running or waiting in vLLM."""
        return self._engine.num_unfinished


@functools.cache
def _temporary() -> OwnedFolder:
    """vLLM leaves the file there that belongs to the process group, so it lasts as long as the process."""
    return OwnedFolder("ownloop-generator-")
