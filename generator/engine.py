"""A vLLM engine in this process: any number of requests at a time, each an await, and weight updates between them.

One thread builds the engine and steps it. Callers put commands into its queue. Before every step the thread takes all
commands from it, so a new request joins the running ones at the next token (continuous batching). A weight update in
"drain" mode waits until the running requests of its policy have finished, and that policy's later requests wait behind
it (`Backlog` in `generator/engine_calls.py`); an "inflight" update is applied between two steps.
`generator/updates.py` applies updates.

In a tensor-parallel group every rank runs this class. Rank 0 takes the commands and broadcasts them, and all ranks take
the same steps. The engine knows neither actors nor the controller.
"""

import asyncio
import itertools
import secrets
import threading
import traceback
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.stats import PrefixCacheStats

from generator._compat import patch_masks
from generator.config import GeneratorConfig, check_length
from generator.conversion import ServedPolicy, bounded, to_completions, to_vllm
from generator.cpu.patches import patch_cpu
from generator.cpu.sampler import return_kept_sets
from generator.engine_calls import (
    ActivityClock,
    Backlog,
    Cancel,
    Close,
    Drop,
    EngineCalls,
    EngineStatus,
    Freeze,
    Generate,
    Queued,
    Sleep,
    Stream,
    Update,
    WakeUp,
)
from generator.engine_part import EnginePart, engine_parts
from generator.options import engine_options
from generator.updates import WeightUpdates
from rl.images import images_of, join_tokens
from rl.lora import Policy
from rl.system.hf_config import end_token_ids, find_family, read_config, vision_of
from rl.types import Completion, PullMode, SamplingParams
from rl.weights.store import Store
from rl.weights.version import Fetch, VersionRecord, WeightsError

_INCOMPLETE = "the weights are incomplete since a failed update ({}); pull a version again"


class EngineLoad:
    """What vLLM's scheduler has had to do since it was last asked: the largest numbers of all steps."""

    def __init__(self, engine: LLMEngine, parts: Sequence[EnginePart]) -> None:
        """Watches the scheduler of this engine. vLLM's own statistics are off, since they cost time in every step."""
        self._parts = parts
        self._largest: dict[str, float] = {}
        self._scheduler: Any = engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
        # Hits of the prefix cache are counted without the rest.
        self._scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
        self._scheduler.kv_cache_manager.log_stats = True

    def after_step(self) -> None:
        """Looks at the scheduler."""
        running, waiting = self._scheduler.get_request_counts()
        now = {"running": running, "waiting": waiting, "kv_use": self._scheduler.kv_cache_manager.usage}
        largest = self._largest  # which another thread may take
        for name, value in now.items():
            largest[f"engine_{name}_max"] = max(largest.get(f"engine_{name}_max", 0.0), float(value))

    def take(self) -> dict[str, float]:
        """`engine_running_max`, `engine_waiting_max`, `engine_kv_use_max`, `engine_prefix_hits` and those of parts.

        Begins anew. Empty without a step, and without the hits if no prompt was looked up.
        """
        largest, self._largest = self._largest, {}
        for part in self._parts:
            largest.update(part.take_metrics())
        found = self._scheduler.kv_cache_manager.make_prefix_cache_stats()
        return {**largest, "engine_prefix_hits": found.hits / found.queries} if found.queries else largest


class GenerationEngine:
    """Samples completions and loads new weights. Safe to call from any number of tasks of one event loop."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Builds the engine, which takes seconds. `options.generator_env` must already be this process's environment.

        RANK and WORLD_SIZE in the environment say which rank of the tensor-parallel group this is. Raises what vLLM
        raises.
        """
        self._config = config
        self._calls = EngineCalls()
        self._fetches: dict[str, Fetch] = {}  # of the updates that this rank was asked for
        self._backlog = Backlog()
        self._running: dict[str, ServedPolicy] = {}  # by the ids of the requests in vLLM
        self._ids = itertools.count()
        self._clock = ActivityClock()
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(built,), name="generation-engine", daemon=True)
        self._thread.start()
        built.result()

    @property
    def version(self) -> int:
        """Version of the model's weights; 0, the weights of its directory, until the first update."""
        return self._updates.model.version

    @property
    def llm(self) -> LLMEngine:
        """vLLM's engine. Only what never changes may be read from it, such as its configuration."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together, see `GeneratorConfig`. vLLM's own number may be larger."""
        return self._config.max_model_len

    @property
    def num_unfinished(self) -> int:
        """Samples that are running or waiting in vLLM."""
        return self._engine.get_num_unfinished_requests()

    def status(self) -> EngineStatus:
        """What the engine's thread is doing. Answers at once, however long the thread's work takes."""
        return self._clock.status(self.num_unfinished, self._calls.failure)

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt, which is computed once. Sample i uses `sampling.seed + i`.

        Log-probs are of the distribution that was sampled from, after temperature, top-k, top-p and min-p; for greedy
        completions (temperature 0), of the model at temperature 1. Cancelling the call frees its place in the
        batch.

        The request is one that `check_request` and `check_policy` accept. Raises ValueError if vLLM rejects it, and
        `WeightsError` if the last update left no usable weights; other requests continue. Raises `EngineStoppedError`
        once the thread has ended.
        """
        if sampling.seed is None:  # drawn once, so that all tensor-parallel ranks sample the same tokens
            sampling = replace(sampling, seed=secrets.randbits(31))
        num_distinct = num_samples if sampling.temperature > 0 else 1  # greedy samples are all the same
        request = Generate(self._next_id(), join_tokens(prompt_tokens), sampling, num_distinct, policy)
        output: RequestOutput = await self._calls.answered(request)
        completions = to_completions(output, self._tokenizer, self._ends)  # here, while the engine steps on
        sampled = [replace(each, temperature=sampling.temperature) for each in completions]
        if not sampling.cuts or sampling.temperature == 0:
            sampled = [replace(each, kept=None) for each in sampled]
        return sampled * (num_samples // num_distinct)

    def stream(
        self, prompt_tokens: Sequence[int], params: vllm.SamplingParams, *, policy: Policy = None
    ) -> AsyncGenerator[RequestOutput]:
        """Samples one prompt as vLLM's own parameters say, and yields vLLM's outputs.

        Raises as `generate` does, and ValueError if the request exceeds the context.
        """
        scores_prompt = params.prompt_logprobs is not None
        check_length(len(prompt_tokens), params.max_tokens or 1, self._config, scores_prompt=scores_prompt)
        if params.seed is None:
            params.seed = secrets.randbits(31)
        return self._calls.stream(Stream(self._next_id(), join_tokens(prompt_tokens), params, policy))

    async def update_weights(
        self,
        record: VersionRecord,
        store: Store,
        *,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Loads a published version; `rl.protocols.Generator.pull_model_state_dict` describes the options.

        Raises ValueError if the version does not fit the model or is no longer kept, and `WeightsError` if its bytes
        cannot be had. The old weights then stay in use. If the error came while they were being replaced, running
        requests raise `WeightsError`, and so do new ones until an update succeeds.
        """
        update = Update(self._next_id(), record, frozen, mode, keep_prefix_cache)
        loop = asyncio.get_running_loop()
        self._fetches[update.id] = lambda key: asyncio.run_coroutine_threadsafe(store.get(key), loop)
        # A swap that has begun is always brought to its end.
        await asyncio.shield(asyncio.wrap_future(self._calls.submit(update)))

    async def freeze(self, name: str, version: int) -> bool:
        """Keeps an adapter's newest version as `(name, version)`, if it is this one. Returns whether it is kept now.

        Waits behind earlier updates of the adapter, which may wait for running requests. The call may be cancelled.
        """
        return await self._calls.answered(Freeze(self._next_id(), name, version))

    async def drop_policy(self, policy: Policy) -> None:
        """Serves an adapter or a frozen version no longer; running requests finish. Raises ValueError without it."""
        await asyncio.wrap_future(self._calls.submit(Drop(self._next_id(), policy)))

    async def sleep(self) -> None:
        """Frees the GPU's memory once no request is running."""
        await asyncio.wrap_future(self._calls.submit(Sleep(self._next_id())))

    async def wake_up(self) -> None:
        """Takes the GPU's memory again. Weights have stayed, or are loaded again."""
        await asyncio.wrap_future(self._calls.submit(WakeUp(self._next_id())))

    def close(self) -> None:
        """Ends the thread. Unfinished requests raise `EngineStoppedError`."""
        if self._thread.is_alive():
            self._calls.put(Close(self._next_id()))
            self._thread.join()

    def _next_id(self) -> str:
        return str(next(self._ids))

    # All methods below run in the engine's thread.

    def _run(self, built: "Future[None]") -> None:
        try:
            self._build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            while self._serve():
                pass
            self._calls.end(RuntimeError("it was closed"))
        except BaseException as error:
            traceback.print_exc()
            self._calls.end(error)

    def _build(self) -> None:
        patch_masks()
        config = read_config(self._config.model)
        self._vision, self._ends = vision_of(config), end_token_ids(self._config.model, config)
        if current_platform.is_cpu():
            patch_cpu()
            if (family := find_family(config)) is not None and family.patch_cpu:
                resolve_name(family.patch_cpu)()
        self._parts = parts = engine_parts(self._config, has_gpu=not current_platform.is_cpu())
        for part in parts:
            part.before_build()
        # vLLM's defaults depend on who asks: on an H100 a step of its `LLM` computes 16,384 tokens, of others 2,048.
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_options(self._config)), UsageContext.LLM_CLASS)
        if current_platform.is_cpu():
            return_kept_sets(self._engine)
        for part in parts:
            part.after_build(self._engine)
        self._tokenizer: Any = self._engine.renderer.tokenizer
        self._group = get_tp_group()
        self._updates = WeightUpdates(self._engine, self._group, self._config)
        self.load = EngineLoad(self._engine, parts)

    def _serve(self) -> bool:
        """Handles all queued commands, waiting for one if there is nothing to do, and steps once. False to stop."""
        idle = not self._engine.has_unfinished_requests() and not self._backlog
        for command in self._calls.receive(self._group, self._clock, wait=idle):
            if isinstance(command, Cancel):
                self._cancel(command)
            else:
                self._backlog.append(command)
        while (command := self._backlog.next(self._has_requests)) is not None:
            if isinstance(command, Close):
                return False
            try:
                self._carry_out(command)
            except Exception as error:
                self._calls.answer(command.id, error=error)
        if self._engine.has_unfinished_requests():
            self._step()
        return True

    def _has_requests(self, policy: Policy) -> bool:
        if policy is None:  # they all compute with the model itself
            return self._engine.has_unfinished_requests()
        return any(served.policy == policy for served in self._running.values())

    def _carry_out(self, command: Queued) -> None:
        match command:
            case Generate() | Stream():
                self._admit(command)
            case Update():
                self._update(command)
                self._calls.answer(command.id)
            case Freeze():
                self._calls.answer(command.id, self._updates.freeze(command.name, command.version))
            case Drop():
                self._updates.drop(command.policy)
                self._calls.answer(command.id)
            case Sleep():
                self._updates.sleep(self._step)
                self._calls.answer(command.id)
            case WakeUp():
                self._engine.wake_up()
                self._calls.answer(command.id)
            case Close():
                raise AssertionError("the caller ends the thread")

    def _step(self) -> None:
        with self._clock.during("step"):
            outputs = self._engine.step()
        self.load.after_step()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            self._running[output.request_id].name_versions(output)
            self._calls.pass_on(output)
            if output.finished:
                del self._running[output.request_id]
                self._calls.answer(output.request_id, output)
        self._updates.free_dropped()

    def _update(self, update: Update) -> None:
        """Applies an update. If it leaves a mixture of versions, running requests are aborted."""
        for part in self._parts:
            part.check_version(update.record)
        self._updates.finish_steps(self._step)
        try:
            with self._clock.during("pull"):
                self._updates.apply(
                    update.record,
                    self._fetches.pop(update.id, None),
                    frozen=update.frozen,
                    keep_prefix_cache=update.keep_prefix_cache,
                )
        finally:
            if self._updates.inconsistent is not None:
                self._engine.abort_request(list(self._running))
                for request_id in self._running:
                    self._calls.answer(request_id, error=WeightsError(_INCOMPLETE.format(self._updates.inconsistent)))
                self._running.clear()

    def _admit(self, request: Generate | Stream) -> None:
        """Hands a request to vLLM. Raises ValueError if vLLM rejects it."""
        self._updates.load_dropped()
        if self._updates.inconsistent is not None:
            raise WeightsError(_INCOMPLETE.format(self._updates.inconsistent))
        policy = self._updates.find(request.policy)
        prompt = vllm.TokensPrompt(prompt_token_ids=list(request.prompt_tokens))
        if self._vision is not None and (images := images_of(request.prompt_tokens)):
            prompt = resolve_name(self._vision.prompt)(request.prompt_tokens, images)
        if isinstance(request, Generate):
            vllm_config = self._engine.model_config
            size, masks_all = vllm_config.get_vocab_size(), vllm_config.return_sampling_mask
            sampling = bounded(request.sampling, size, masks_all=masks_all)
            params = to_vllm(sampling, request.num_samples, self._tokenizer)
        else:
            params = request.params
        try:
            self._engine.add_request(request.id, prompt, params, lora_request=policy.lora_request)
        except (ValueError, VLLMValidationError) as error:
            # Callers need not have imported vLLM, so its own exceptions would be of no use to them.
            raise ValueError(str(error)) from None
        self._running[request.id] = policy

    def _cancel(self, cancel: Cancel) -> None:
        if not self._backlog.cancel(cancel):
            self._engine.abort_request([cancel.id])
            self._running.pop(cancel.id, None)
        self._calls.forget(cancel.id)
