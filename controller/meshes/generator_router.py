"""`GeneratorRouter`: several generators of one model as the one `Generator` that a controller script sees.

A request goes to the replica that answered its prompt before, because its prefix cache may still hold the prompt, and
otherwise to the replica with the fewest samples in progress. A replica that is pulling or down gets no requests. A
replica whose process died is restarted, and serves again once it has pulled the current version.

Errors tell the router what happened: a `MeshError` means that the replica died or was killed because it hung, a
`RequestTimeoutError` that it is slow, and every other error that the caller made a mistake.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from controller.meshes.errors import MeshError
from generator.config import OnFailure
from rl.checks import check_at_least, check_known
from rl.protocols import Generator
from rl.types import PULL_MODES, Completion, PullMode, SamplingParams

ReplicaState = Literal["serving", "pulling", "outdated", "down"]
"""`outdated`: the replica was restarted, but could not pull the current version any more; it serves after the next."""

_NUM_REMEMBERED_PROMPTS = 4096
_MAX_FAILURES = 3  # a request whose replicas died so many times is taken for the cause, and not retried again


class StoppableGenerator(Generator, Protocol):
    """A generator with processes of its own, such as `GeneratorHandle`."""

    async def stop(self) -> None:
        """Ends its processes. May be called again, and after they died."""
        ...


@dataclass(slots=True)
class _Replica:
    """One of the router's generators. After a restart it is another generator in the same place."""

    generator: StoppableGenerator
    state: ReplicaState = "serving"
    num_samples: int = 0
    """Samples in progress."""
    error: BaseException | None = None
    """Why it is down for good; None while it may still be restarted."""
    restart: "asyncio.Task[None] | None" = None


class GeneratorRouter:
    """Implements `rl.protocols.Generator`. To be used from one event loop."""

    def __init__(
        self,
        generators: Sequence[StoppableGenerator],
        start: Callable[[int], Awaitable[StoppableGenerator]],
        *,
        on_failure: OnFailure = "retry",
    ) -> None:
        """Use `launch`."""
        self._replicas = [_Replica(generator) for generator in generators]
        self._start = start
        self._on_failure: OnFailure = on_failure
        self._version: int | None = None
        self._prompts: OrderedDict[tuple[int, ...], _Replica] = OrderedDict()  # which replica answered a prompt
        self._states_changed = asyncio.Condition()
        self._pull_lock = asyncio.Lock()
        self._pull_task: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        start: Callable[[int], Awaitable[StoppableGenerator]],
        num_replicas: int,
        *,
        on_failure: OnFailure = "retry",
    ) -> "GeneratorRouter":
        """Starts the replicas side by side. `start(index)` starts one, now and again whenever that replica died.

            async def start(index: int) -> GeneratorHandle:
                return await GeneratorHandle.launch(config, log_dir / f"generator-{index}")

        `on_failure` says what happens to requests in progress when their replica dies: "retry" sends them to another
        replica, "raise" raises `MeshError`.
        """
        check_at_least(1, num_replicas=num_replicas)
        check_known("on_failure", on_failure, get_args(OnFailure))
        starts = [asyncio.ensure_future(start(index)) for index in range(num_replicas)]
        try:
            return cls(await asyncio.gather(*starts), start, on_failure=on_failure)
        except BaseException:
            for each in starts:
                each.cancel()
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(started.stop() for started in outcomes if not isinstance(started, BaseException)))
            raise

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state of each replica."""
        return tuple(replica.state for replica in self._replicas)

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt, all on one replica. Waits while every replica is pulling.

        Raises `MeshError` if no replica is left, or if the replica died and requests are not retried, and any error
        that the replica raises.
        """
        prompt, num_failures = tuple(prompt_tokens), 0
        while True:
            replica = await self._choose(prompt)
            generator = replica.generator
            replica.num_samples += num_samples
            try:
                return await generator.generate(prompt, sampling, num_samples)
            except MeshError:
                # Several requests notice the death of one generator; only the first restarts it. By the time that a
                # later one notices, another generator may be in its place.
                if replica.generator is generator and replica.state != "down":
                    self._restart(replica)
                num_failures += 1
                if self._on_failure == "raise" or num_failures == _MAX_FAILURES:
                    raise
            finally:
                if replica.generator is generator:
                    replica.num_samples -= num_samples

    async def pull_model_state_dict(
        self, version: int, *, mode: PullMode = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Every replica loads this version. Requests made from now on are answered under it.

        If only some replicas cannot load it, they are restarted. If none can, raises their error, and replicas that
        are alive continue under the old weights.
        """
        check_known("mode", mode, PULL_MODES)
        # The pull is shielded from its caller's cancellation: if it ended in the middle, versions would differ.
        self._pull_task = asyncio.create_task(self._pull(version, mode, keep_prefix_cache))
        await asyncio.shield(self._pull_task)

    async def version(self) -> int:
        """The policy version in use. Before the first pull it is 0: the weights in the model's directory."""
        return self._version or 0

    async def stop(self) -> None:
        """Ends every replica. May be called again."""
        restarts = [replica.restart for replica in self._replicas if replica.restart is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        for replica in self._replicas:
            replica.state, replica.error = "down", replica.error or MeshError("generator", "it was stopped")
        await asyncio.gather(*(replica.generator.stop() for replica in self._replicas))
        await self._notify()

    async def _pull(self, version: int, mode: PullMode, keep_prefix_cache: bool) -> None:
        replicas: list[_Replica] = []
        while not replicas:  # between the wait and the lock, the only replica that was up may have died
            await self._wait_for("serving", "outdated")
            async with self._pull_lock:
                replicas = [replica for replica in self._replicas if replica.state in ("serving", "outdated")]
                await self._pull_all(replicas, version, mode, keep_prefix_cache)

    async def _pull_all(
        self, replicas: Sequence[_Replica], version: int, mode: PullMode, keep_prefix_cache: bool
    ) -> None:
        states_before: list[ReplicaState] = [replica.state for replica in replicas]
        for replica in replicas:
            replica.state = "pulling"
        outcomes = await asyncio.gather(
            *(
                replica.generator.pull_model_state_dict(version, mode=mode, keep_prefix_cache=keep_prefix_cache)
                for replica in replicas
            ),
            return_exceptions=True,
        )
        errors = [outcome for outcome in outcomes if outcome is not None]
        if len(errors) < len(replicas):
            self._version = version
            if not keep_prefix_cache:
                self._prompts.clear()
        for replica, state_before, outcome in zip(replicas, states_before, outcomes, strict=True):
            if replica.state == "down":  # a request noticed its death during the pull and restarted it
                continue
            if outcome is None:
                replica.state = "serving"
            elif len(errors) == len(replicas) and not isinstance(outcome, MeshError):
                replica.state = state_before
            else:
                self._restart(replica)
        await self._notify()
        if errors and len(errors) == len(replicas):
            # A mistake of the caller explains more than the death of a process, so it is raised first.
            raise min(errors, key=lambda error: isinstance(error, MeshError))

    async def _choose(self, prompt: tuple[int, ...]) -> _Replica:
        """The replica to send a prompt to. Waits until one is serving."""
        serving = await self._wait_for("serving")
        replica = self._prompts.get(prompt)
        if replica is None or replica.state != "serving":
            replica = min(serving, key=lambda each: each.num_samples)
        self._prompts[prompt] = replica
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > _NUM_REMEMBERED_PROMPTS:
            self._prompts.popitem(last=False)
        return replica

    async def _wait_for(self, *states: ReplicaState) -> list[_Replica]:
        """The replicas in these states. Waits until there is one; raises `MeshError` if all are down for good."""
        async with self._states_changed:
            while not (found := [replica for replica in self._replicas if replica.state in states]):
                errors = [replica.error for replica in self._replicas]
                if all(error is not None for error in errors):
                    raise MeshError("generator", f"no replica is left: {errors[0]}") from errors[0]
                await self._states_changed.wait()
        return found

    def _restart(self, replica: _Replica) -> None:
        """Sends a replica no more requests, and starts another generator in its place."""
        replica.state = "down"
        replica.restart = asyncio.create_task(self._start_replacement(replica))

    async def _start_replacement(self, replica: _Replica) -> None:
        try:
            await replica.generator.stop()
            generator = await self._start(self._replicas.index(replica))
            replica.generator, replica.num_samples = generator, 0
            async with self._pull_lock:  # a pull in progress ends first, so that the replacement gets its version
                replica.state = "pulling"
                if self._version is not None:
                    await generator.pull_model_state_dict(self._version)
                replica.state = "serving"
        except ValueError:  # the current version is gone from the store; the next pull brings a newer one
            replica.state = "outdated"
        except Exception as error:
            replica.state, replica.error = "down", error
        await self._notify()

    async def _notify(self) -> None:
        async with self._states_changed:
            self._states_changed.notify_all()
