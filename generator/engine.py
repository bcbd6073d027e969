"""A vLLM engine in this process: any number of requests at a time, each an await, and weights that change in between.

One thread builds the engine and steps it. Callers put commands into its queue; before every step it takes what is
there, so a request joins those that run at the next token (continuous batching). A weight update waits at the head of
the queue until the running requests have finished; requests behind it wait for it. In a tensor-parallel group every
rank runs this class, rank 0 takes the commands and broadcasts them, and all step alike.

The engine knows no actor, no controller and no store beyond `get`.
"""

import asyncio
import contextlib
import itertools
import queue
import secrets
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import vllm
from torch import distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from generator._compat import patch_cpu
from generator.config import GeneratorConfig, check_request
from generator.conversion import to_completion, to_vllm
from generator.options import engine_options
from generator.weights import NamedTensors, TensorQueue, WeightLoader, fetch_tensors, queued_tensors
from rl.types import Completion, SamplingParams
from rl.weights import Store, VersionRecord, WeightsError

_IDLE_S = 60.0  # ranks that wait for a broadcast hear from rank 0 this often, or their group would time out
_QUEUED_TENSORS = 2


@dataclass(frozen=True, slots=True)
class _Generate:
    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: str
    """Of the request to drop."""


@dataclass(frozen=True, slots=True)
class _Update:
    id: str
    record: VersionRecord


@dataclass(frozen=True, slots=True)
class _Close:
    id: str


_Command = _Generate | _Cancel | _Update | _Close


class GenerationEngine:
    """Samples completions and takes in new weights. Safe to call from any number of tasks of one event loop."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Builds the engine; takes seconds. `options.generator_env` must be this process's environment already.

        Torch's RANK and WORLD_SIZE say which rank of the tensor-parallel group this is. Raises what vLLM raises.
        """
        self._config = config
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._answers: dict[str, Future[Any]] = {}
        self._feeds: dict[str, TensorQueue] = {}
        self._backlog: deque[_Generate | _Update | _Close] = deque()
        self._ids = itertools.count()
        self._version = 0
        self._failure: BaseException | None = None
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(built,), name="generation-engine", daemon=True)
        self._thread.start()
        built.result()

    @property
    def version(self) -> int:
        """Policy version of the weights; 0 until the first update: those of the model's directory."""
        return self._version

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt, which is computed once. Sample i uses `sampling.seed + i`.

        A completion's log-probs are of the distribution it was sampled from, after temperature, top-k and top-p; of a
        greedy one (temperature 0) the model's own, at temperature 1. Cancelling the call frees its place in the batch.

        Raises ValueError for a request that vLLM rejects or the context cannot hold, `WeightsError` while the last
        update has left no usable weights. Other requests are unharmed.
        """
        check_request(len(prompt_tokens), sampling.max_tokens, num_samples, self._config)
        if sampling.seed is None:  # drawn here, so that every rank of a tensor-parallel group samples the same tokens
            sampling = replace(sampling, seed=secrets.randbits(31))
        num_distinct = num_samples if sampling.temperature > 0 else 1  # greedy samples are all the same
        request = _Generate(self._next_id(), tuple(prompt_tokens), sampling, num_distinct)
        answer = self._submit(request)
        try:
            return (await asyncio.wrap_future(answer)) * (num_samples // num_distinct)
        except asyncio.CancelledError:
            self._commands.put(_Cancel(request.id))
            raise

    async def update_weights(self, record: VersionRecord, store: Store) -> None:
        """Takes in a published version, once the requests that were made before have finished.

        Raises ValueError if the version does not fit the model or is gone, `WeightsError` if its bytes cannot be had.
        The old weights stay in use then, unless the error came while they were being replaced: generation is refused
        then until an update succeeds.
        """
        update = _Update(self._next_id(), record)
        fetching: asyncio.Task[None] | None = None
        if record.transport == "torchstore":
            self._feeds[update.id] = queue.Queue(_QUEUED_TENSORS)
        done = asyncio.wrap_future(self._submit(update))
        if update.id in self._feeds:
            fetching = asyncio.create_task(fetch_tensors(store, record, self._feeds[update.id], done))
        try:
            await asyncio.shield(done)  # a swap that has begun is always brought to its end
        finally:
            if fetching is not None and done.done():
                fetching.cancel()

    def close(self) -> None:
        """Ends the thread; unfinished requests raise `RuntimeError`."""
        if self._thread.is_alive():
            self._commands.put(_Close(self._next_id()))
            self._thread.join()

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _submit(self, command: _Generate | _Update) -> Future[Any]:
        if self._failure is not None:
            raise RuntimeError(f"the generation engine has stopped: {self._failure}")
        answer: Future[Any] = Future()
        self._answers[command.id] = answer
        self._commands.put(command)
        return answer

    # What follows runs in the engine's thread.

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
            self._failure = RuntimeError("it was closed")
        except BaseException as error:
            self._failure = error
        for request_id in list(self._answers):
            self._answer(request_id, error=RuntimeError(f"the generation engine has stopped: {self._failure}"))

    def _build(self) -> None:
        if current_platform.is_cpu():
            patch_cpu()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_options(self._config)))
        self._engine.set_weight_version(str(self._version))
        self._tokenizer: Any = self._engine.renderer.tokenizer
        self._group = get_tp_group()
        self._loader = WeightLoader(
            self._engine.model_executor.driver_worker.get_model(),
            self._config.model,
            tied_embeddings=self._engine.model_config.hf_text_config.tie_word_embeddings,
        )
        self._torn: Exception | None = None  # why the weights are a mixture, if they are

    def _serve(self) -> bool:
        """Takes the commands that are there, waiting for one if there is nothing to do, then steps once."""
        for command in self._receive(wait=not self._engine.has_unfinished_requests() and not self._backlog):
            if isinstance(command, _Cancel):
                self._cancel(command.id)
            else:
                self._backlog.append(command)
        while self._backlog:
            command = self._backlog[0]
            if isinstance(command, _Close):
                return False
            if isinstance(command, _Update) and self._engine.has_unfinished_requests():
                break
            self._backlog.popleft()
            try:
                if isinstance(command, _Update):
                    self._update(command)
                    self._answer(command.id)
                else:
                    self._admit(command)
            except Exception as error:
                self._answer(command.id, error=error)
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                self._finish(output)
        return True

    def _receive(self, *, wait: bool) -> list[_Command]:
        """Rank 0's commands, on every rank."""
        commands: list[_Command] = []
        if self._group.rank_in_group == 0:
            with contextlib.suppress(queue.Empty):
                if wait:
                    commands.append(self._commands.get(timeout=_IDLE_S))
                while True:
                    commands.append(self._commands.get_nowait())
        return cast(list[_Command], self._group.broadcast_object(commands))

    def _admit(self, request: _Generate) -> None:
        """Hands a request to vLLM. Raises ValueError if vLLM rejects it."""
        if self._torn is not None:
            raise WeightsError(f"the weights are incomplete since a failed update ({self._torn}); pull a version again")
        sampling = request.sampling
        if sampling.stop and self._tokenizer is None:
            raise ValueError(
                f"SamplingParams.stop is {sampling.stop}; {self._config.model} has no tokenizer to find it"
            )
        prompt = vllm.TokensPrompt(prompt_token_ids=list(request.prompt_tokens))
        try:
            self._engine.add_request(request.id, prompt, to_vllm(sampling, request.num_samples))
        except (ValueError, VLLMValidationError) as error:
            # vLLM's own exceptions mean nothing to a caller that has not imported it.
            raise ValueError(str(error)) from None

    def _finish(self, output: RequestOutput) -> None:
        try:
            completions = [to_completion(sample, self._tokenizer) for sample in output.outputs]
        except Exception as error:
            self._answer(output.request_id, error=error)
        else:
            self._answer(output.request_id, completions)

    def _cancel(self, request_id: str) -> None:
        waiting = [command for command in self._backlog if command.id == request_id]
        for command in waiting:
            self._backlog.remove(command)
        if not waiting:
            self._engine.abort_request([request_id])
        self._answers.pop(request_id, None)

    def _update(self, update: _Update) -> None:
        """Checks on every rank before any of them loads; loads on all."""
        record, feed = update.record, self._feeds.pop(update.id, None)
        problem: Exception | None = None
        with contextlib.ExitStack() as stack:
            tensors: NamedTensors = ()
            try:
                self._loader.check(record)
                if record.transport == "shared_memory":
                    tensors = stack.enter_context(self._loader.shared_memory(record))
                else:
                    tensors = stack.enter_context(contextlib.closing(self._from_rank_zero(feed)))
            except Exception as error:
                problem = error
            self._raise_on_every_rank(problem)
            try:
                self._loader.load(tensors)
            except Exception as error:
                problem = error
        try:
            self._raise_on_every_rank(problem)
        except Exception as error:
            self._torn = error
            raise
        self._torn = None
        self._engine.reset_prefix_cache()
        self._engine.set_weight_version(str(record.version))
        self._version = record.version

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

    def _answer(self, request_id: str, result: Any = None, error: BaseException | None = None) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return  # not this rank's to answer, or cancelled
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
