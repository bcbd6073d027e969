"""`GeneratorRouter`: several generators of one model as the one `Generator` that a controller script sees.

A request goes to the replica that was sent its prompt before, whose prefix cache may still hold it, and otherwise to
the one with the fewest samples in progress. A replica that pulls or is down is sent nothing. One whose process died is
started again and serves once it has pulled the current version; it is told apart from a mistake of the caller by the
`MeshError` that its calls raise, and from one that is merely slow by that being no `DeadlineError`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from controller.meshes.errors import DeadlineError, MeshError
from generator.config import OnFailure
from rl.checks import check_at_least, check_known
from rl.protocols import Generator
from rl.types import PULL_MODES, Completion, PullMode, SamplingParams

ReplicaState = Literal["serving", "pulling", "behind", "down"]
"""`behind` is one that was started again and found its version gone: it serves from the next pull on."""

_REMEMBERED_PROMPTS = 4096
_MAX_FAILURES = 3  # of replicas under one request, before the request is held to be the cause


class Replica(Generator, Protocol):
    """What a router is made of; `GeneratorHandle` is one."""

    async def stop(self) -> None:
        """Ends its processes. May be called again, and when they are dead."""
        ...


@dataclass(slots=True)
class _Place:
    """One replica as the router sees it."""

    replica: Replica
    state: ReplicaState = "serving"
    num_samples: int = 0
    """In progress."""
    problem: BaseException | None = None
    """Why it is down and stays so."""
    restart: "asyncio.Task[None] | None" = None


class GeneratorRouter:
    """Implements `rl.protocols.Generator`. To be used from one event loop."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        start: Callable[[int], Awaitable[Replica]],
        *,
        on_failure: OnFailure = "retry",
    ) -> None:
        """Use `launch`."""
        self._places = [_Place(replica) for replica in replicas]
        self._start = start
        self._on_failure: OnFailure = on_failure
        self._version: int | None = None
        self._prompts: OrderedDict[tuple[int, ...], _Place] = OrderedDict()  # which replica computed a prompt
        self._changed = asyncio.Condition()
        self._pulling = asyncio.Lock()
        self._pull_task: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        start: Callable[[int], Awaitable[Replica]],
        num_replicas: int,
        *,
        on_failure: OnFailure = "retry",
    ) -> "GeneratorRouter":
        """Starts the replicas side by side; `start(index)` makes one, now and whenever it died.

            async def start(index: int) -> GeneratorHandle:
                return await GeneratorHandle.launch(config, log_dir / f"generator-{index}")

        `on_failure` decides about requests in progress when their replica dies: "retry" sends them to other replicas,
        "raise" raises `MeshError`.
        """
        check_at_least(1, num_replicas=num_replicas)
        check_known("on_failure", on_failure, get_args(OnFailure))
        starting = [asyncio.ensure_future(start(index)) for index in range(num_replicas)]
        try:
            return cls(await asyncio.gather(*starting), start, on_failure=on_failure)
        except BaseException:
            for replica in starting:
                replica.cancel()
            started = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(replica.stop() for replica in started if not isinstance(replica, BaseException)))
            raise

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """What each replica is doing."""
        return tuple(place.state for place in self._places)

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1
    ) -> list[Completion]:
        """Samples `num_samples` completions of one prompt, all on one replica. Waits while every replica pulls.

        Raises `MeshError` when no replica is left, or one died and requests are not sent again, and what the replica
        raises.
        """
        prompt, num_failures = tuple(prompt_tokens), 0
        while True:
            place = await self._pick(prompt)
            replica = place.replica
            place.num_samples += num_samples
            try:
                return await replica.generate(prompt, sampling, num_samples)
            except DeadlineError:  # too long a request, which says nothing about its replica
                raise
            except MeshError:
                if place.replica is replica and place.state != "down":  # the first of its requests to notice
                    self._restart(place)
                num_failures += 1
                if self._on_failure == "raise" or num_failures == _MAX_FAILURES:
                    raise
            finally:
                if place.replica is replica:
                    place.num_samples -= num_samples

    async def pull_model_state_dict(
        self, version: int, *, mode: PullMode = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Every replica takes this version; requests made from now on are answered under it.

        Raises what the replicas raise if none of them could take it; all go on under the old weights then. If only
        some could not, these are started anew.
        """
        check_known("mode", mode, PULL_MODES)
        # A pull that was begun is brought to its end, even if its caller gives up: all replicas hold one version.
        self._pull_task = asyncio.create_task(self._pull(version, mode, keep_prefix_cache))
        await asyncio.shield(self._pull_task)

    async def version(self) -> int:
        """Policy version of the weights in use; 0 before the first pull: the weights in the model's directory."""
        return self._version or 0

    async def stop(self) -> None:
        """Ends every replica. May be called again."""
        restarts = [place.restart for place in self._places if place.restart is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        for place in self._places:
            place.state, place.problem = "down", place.problem or MeshError("generator", "it was stopped")
        await asyncio.gather(*(place.replica.stop() for place in self._places))
        await self._notify()

    async def _pull(self, version: int, mode: PullMode, keep_prefix_cache: bool) -> None:
        places: list[_Place] = []
        while not places:
            await self._any_in("serving", "behind")
            async with self._pulling:
                places = [place for place in self._places if place.state in ("serving", "behind")]
                await self._pull_all(places, version, mode, keep_prefix_cache)

    async def _pull_all(self, places: Sequence[_Place], version: int, mode: PullMode, keep_prefix_cache: bool) -> None:
        before: list[ReplicaState] = [place.state for place in places]
        for place in places:
            place.state = "pulling"
        outcomes = await asyncio.gather(
            *(
                place.replica.pull_model_state_dict(version, mode=mode, keep_prefix_cache=keep_prefix_cache)
                for place in places
            ),
            return_exceptions=True,
        )
        problems = [outcome for outcome in outcomes if outcome is not None]
        if len(problems) < len(places):
            self._version = version
            if not keep_prefix_cache:
                self._prompts.clear()
        for place, state, outcome in zip(places, before, outcomes, strict=True):
            if place.state == "down":  # one of its requests noticed that it died
                continue
            if outcome is None:
                place.state = "serving"
            elif len(problems) == len(places) and not isinstance(outcome, MeshError):
                place.state = state
            else:
                self._restart(place)
        await self._notify()
        if problems and len(problems) == len(places):
            raise min(problems, key=lambda problem: isinstance(problem, MeshError))  # a mistake explains more

    async def _pick(self, prompt: tuple[int, ...]) -> _Place:
        """The replica to send a prompt to, once there is one."""
        serving = await self._any_in("serving")
        place = self._prompts.get(prompt)
        if place is None or place.state != "serving":
            place = min(serving, key=lambda place: place.num_samples)
        self._prompts[prompt] = place
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > _REMEMBERED_PROMPTS:
            self._prompts.popitem(last=False)
        return place

    async def _any_in(self, *states: ReplicaState) -> list[_Place]:
        """The replicas in one of these states, once there is one. Raises `MeshError` if there will be none."""
        async with self._changed:
            while not (found := [place for place in self._places if place.state in states]):
                problems = [place.problem for place in self._places]
                if all(problem is not None for problem in problems):
                    raise MeshError("generator", f"no replica is left: {problems[0]}") from problems[0]
                await self._changed.wait()
        return found

    def _restart(self, place: _Place) -> None:
        """Sends a replica nothing more and starts another in its place."""
        place.state = "down"
        place.restart = asyncio.create_task(self._start_replacement(place))

    async def _start_replacement(self, place: _Place) -> None:
        try:
            await place.replica.stop()
            replica = await self._start(self._places.index(place))
            place.replica, place.num_samples = replica, 0
            async with self._pulling:
                place.state = "pulling"
                if self._version is not None:
                    await replica.pull_model_state_dict(self._version)
                place.state = "serving"
        except ValueError:
            place.state = "behind"
        except Exception as error:
            place.state, place.problem = "down", error
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
