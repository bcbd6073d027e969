"""`GeneratorHandle`: a mesh of `VLLMGenerator` ranks as the `Generator` that a controller script sees.

How long a request takes depends on the others, so no request has a deadline of its own. While any is under way, the
handle asks every rank's engine for signs of progress: an engine that has ended, or has been in the same step or pull
for longer than its deadline, ends the mesh.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from controller.handles.colocated import SharedGPUs
from controller.processes.calls import is_connection_error
from controller.processes.errors import DeadlineError, MeshError, RequestTimeoutError
from controller.processes.mesh import Mesh
from controller.processes.place import Place, gpu_env
from generator.config import GeneratorConfig, check_policy, check_pull, check_request
from generator.engine_calls import EngineStatus, EngineStoppedError
from generator.openai_calls import OpenAICall, OpenAIReply
from generator.options import check_hardware, generator_env
from rl.checks import check_known
from rl.lora import LivePolicy, Policy
from rl.system.timeline import gauge
from rl.types import PULL_MODES, Completion, PullMode, SamplingParams
from rl.weights.version import VersionRecords

ACTOR = "generator.actor:VLLMGenerator"
"""The class of the ranks' actors. By its name, so that it is imported while the processes start."""
_PROBE_S = 2.0  # between two looks at the engines
_ALIVE_S = 10  # for an answer that costs no work; on an overloaded host even that takes seconds


class GeneratorHandle:
    """Implements `rl.protocols.Generator`."""

    def __init__(
        self,
        mesh: Mesh,
        config: GeneratorConfig,
        version_records: VersionRecords,
        pulls_from: Callable[[], Sequence[Mesh]] = tuple,
    ) -> None:
        """Use `launch`."""
        self.mesh = mesh
        self._version_records = version_records
        self._pulls_from = pulls_from
        self.config = config
        self._num_watched = 0
        self._probes: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        config: GeneratorConfig,
        log_dir: Path,
        *,
        name: str = "generator",
        gpus: Sequence[str] | None = None,
        hosts: Place | None = None,
        version_records: VersionRecords | None = None,
        pulls_from: Callable[[], Sequence[Mesh]] = tuple,
        store_name: str | None = None,
        shared_gpus: SharedGPUs | None = None,
    ) -> "GeneratorHandle":
        """Starts the generator's processes and waits until vLLM has loaded the model.

        `name` appears in log file names and errors. `gpus` are the GPUs of this host to use, one per rank; by default
        every rank sees all of them. `hosts` are other hosts to run on. `version_records` are the trainer's; a version
        that is not in them is looked up in the TorchStore that is named `store_name`; without one, nothing can be
        pulled. `pulls_from` returns the meshes without which no version can be pulled. A colocated
        generator shares `shared_gpus` with trainers, and has their memory now.

        Raises ValueError, before any process starts, if the model directory cannot be served.
        """
        config.check_model()
        has_gpu = None if hosts is None else hosts.has_gpu
        check_hardware(config, has_gpu=has_gpu)
        mesh = await Mesh.spawn(
            name,
            ACTOR,
            config,
            store_name,
            num_ranks=config.tensor_parallel,
            env={**generator_env(config, has_gpu=has_gpu), **gpu_env(gpus)},
            log_dir=log_dir,
            deadlines=config.deadlines,
            hosts=hosts,
        )
        handle = cls(mesh, config, version_records or VersionRecords(), pulls_from)
        try:
            await mesh.call("start", [()] * mesh.num_ranks, varies=True, needs_memory=False)
            await handle._statuses()
        except BaseException:
            await mesh.stop()
            raise
        if shared_gpus is not None:
            shared_gpus.join("sample", handle)
        return handle

    @property
    def name(self) -> str:
        """The mesh's name."""
        return self.mesh.name

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt; see `GenerationEngine.generate`.

        Many calls may be in flight; they are batched continuously. Cancelling a call aborts its requests in vLLM.

        Raises `RequestTimeoutError` after `GeneratorConfig.request_timeout_s`, and `MeshError` if the generator's
        processes or vLLM in them have died or hang.
        """
        tokens = check_request(prompt_tokens, sampling, num_samples, self.config)
        check_policy(policy, self.config)
        call_id, limit = uuid.uuid4().hex, asyncio.timeout(self.config.request_timeout_s)
        try:
            async with self.mesh.gate(), limit:  # the limit begins when the GPUs are there
                return await self._watched("generate", call_id, tokens, sampling, num_samples, policy)
        except asyncio.CancelledError:
            self.mesh.tell("cancel", call_id)
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            self.mesh.tell("cancel", call_id)
            await self._check_alive()
            raise RequestTimeoutError(
                f"{self.mesh.name}: a request took longer than {self.config.request_timeout_s:g} s (request_timeout_s)"
            ) from None

    async def openai(self, call: OpenAICall) -> OpenAIReply:
        """Answers a request in OpenAI's form, by vLLM's own serving code. Closing a stream frees its place.

        Raises ValueError for a parser that vLLM does not have, and for a model without tokenizer; `MeshError` as
        `generate`, in a stream as well. Mistakes in the request itself are a reply.
        """
        check_policy(call.policy, self.config)
        call_id = uuid.uuid4().hex

        async def events() -> AsyncGenerator[str]:
            try:
                while (event := await self._watched("openai_events", call_id)) is not None:
                    yield event
            finally:
                self.mesh.tell("cancel", call_id)

        try:
            status, body = await self._watched("openai", call_id, call)
        except asyncio.CancelledError:
            self.mesh.tell("cancel", call_id)
            raise
        return OpenAIReply(status=status, body=events() if body is None else body)

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Loads exactly this policy version; see `rl.protocols.Generator.pull_model_state_dict`.

        Raises ValueError if this version cannot be pulled, naming the ones that can, and if it does not fit the model.
        The weights in use then stay as they are. Raises `MeshError` if processes of the generator, the trainer or the
        store have died or hang.
        """
        check_known("mode", mode, PULL_MODES)
        check_pull(policy, self.config, frozen=frozen)
        record = self._version_records.find(version, policy)
        arguments = (version, record, policy, frozen, mode, keep_prefix_cache)
        gauge(self.name, await self._watched("pull_model_state_dict", *arguments, needs=self._pulls_from))

    async def drop_policy(self, policy: Policy) -> None:
        """Forgets an adapter or a frozen version; see `rl.protocols.Generator.drop_policy`.

        Raises ValueError if the generator has no such policy.
        """
        check_policy(policy, self.config)
        if policy is None:
            raise ValueError("policy is None; the model itself cannot be dropped")
        await self._watched("drop_policy", policy)

    async def take_memory(self) -> None:
        """Wakes vLLM up, which has its weights on the GPUs again then."""
        await self._watched("wake_up", needs_memory=False)

    async def free_memory(self) -> None:
        """Has vLLM sleep once no request is running: it frees the memory of the GPUs, and keeps weights on the host."""
        await self._watched("sleep", needs_memory=False)

    async def version(self) -> int:
        """The policy version in use. Before the first pull it is 0: the weights in the model's directory."""
        return (await self.mesh.call("version", [()], wait="at once", needs_memory=False))[0]

    async def stop(self) -> None:
        """Ends the generator's processes. May be called again."""
        await self.mesh.stop()

    async def _watched(
        self, verb: str, *args: object, needs_memory: bool = True, needs: Callable[[], Sequence[Mesh]] = tuple
    ) -> Any:
        """The answer of rank 0, which may take any time. Looks at the engines as long as there is such a call."""
        self._num_watched += 1
        if self._probes is None or self._probes.done():
            self._probes = asyncio.create_task(self._probe())
        try:
            (answer,) = await self.mesh.call(verb, [args], wait="watched", needs_memory=needs_memory, needs=needs)
            return answer
        except EngineStoppedError as error:
            statuses = await self._statuses()  # raises if a process died
            raise await self.mesh.end(self._stopped(statuses, verb, error), ()) from error
        finally:
            self._num_watched -= 1
            if self._num_watched == 0:
                self._probes.cancel()
                self._probes = None  # it ends a little later, and a call that begins before that needs others

    async def _probe(self) -> None:
        """Ends the mesh if an engine has stopped or hangs. The calls that wait for it then raise the error."""
        with contextlib.suppress(MeshError):
            while True:
                await asyncio.sleep(_PROBE_S)
                statuses = await self._statuses()
                if any(status.failure is not None for status in statuses):
                    raise await self.mesh.end(self._stopped(statuses, "generate"), ())
                for rank, status in enumerate(statuses):
                    if (failure := self._hang(rank, status)) is not None:
                        raise await self.mesh.end(failure, [rank])

    async def _statuses(self) -> list[EngineStatus]:
        return await self.mesh.call("status", [()] * self.mesh.num_ranks, wait="at once", needs_memory=False)

    def _stopped(
        self, statuses: Sequence[EngineStatus], verb: str, error: EngineStoppedError | None = None
    ) -> MeshError:
        """The failure of the rank whose engine stopped first: the others' connections to it end then."""
        failures = {rank: status.failure for rank, status in enumerate(statuses) if status.failure is not None}
        rank = min(failures, key=lambda rank: is_connection_error(RuntimeError(failures[rank])), default=0)
        reason = f"the engine of {self.mesh.processes.name(rank)} has stopped: {failures.get(rank, error)}"
        failure = MeshError(self.mesh.name, reason, rank=rank, verb=verb)
        failure.__cause__ = error
        return failure

    def _hang(self, rank: int, status: EngineStatus) -> MeshError | None:
        limit_s = self.config.deadlines.limit_s(status.slowest_s)
        if status.activity is None or status.seconds < limit_s:
            return None
        who = self.mesh.processes.name(rank)
        slowest = "it is the first" if status.slowest_s is None else f"the slowest so far took {status.slowest_s:.1f} s"
        reason = f"the engine of {who} has been in one {status.activity} for {status.seconds:.0f} s ({slowest}), with "
        reason += f"{status.num_unfinished} unfinished samples, after {status.num_steps} steps"
        return DeadlineError(self.mesh.name, reason, rank=rank, verb=status.activity)

    async def _check_alive(self) -> None:
        """Raises `MeshError` unless every rank's process answers soon."""
        asked = asyncio.ensure_future(self._statuses())
        try:
            for _ in range(_ALIVE_S):  # seconds in which this process ran: ranks may be stopped together with it
                if (await asyncio.wait([asked], timeout=1.0))[0]:
                    await asked
                    return
        finally:
            asked.cancel()
        failure = DeadlineError(self.mesh.name, f"it hangs: no answer within {_ALIVE_S} s", verb="generate")
        raise await self.mesh.end(failure, range(self.mesh.num_ranks))
