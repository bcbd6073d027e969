"""`Host`: another host as the controller sees it: its agent, whether it still answers, and its log.

No call waits for it: a task asks the agent for a sign of life every second. A host that gives none for `lost_after_s`,
or whose worker has ended, is lost: `lost` says why, and stays. Meshes with ranks there find out within a second (see
other_hosts.py). Only time in which the controller itself ran counts as silence of a host.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, attach_to_workers, default_bootstrap_cmd

from controller.processes.errors import HostLostError
from controller.processes.mesh import ignore_unhandled_faults
from ownloop_hosts.connections import Address, Lifeline, accepts, own_address_towards, resolve
from ownloop_hosts.host_agent import CONTROLLER_VARIABLE, Beat, HostAgent, HostFacts, RankStates
from ownloop_hosts.model_copies import ModelOffer

T = TypeVar("T")

_BEAT_S = 1.0
_CONNECT_S = 30.0
_STOP_S = 3.0
_SUSPICIOUS_S = 3.0  # of silence, after which the worker's port is tried
_LONGEST_LOOK_S = 3 * _BEAT_S  # a look that takes longer was that of a controller that was stopped itself


class HostError(RuntimeError):
    """A host cannot be used; the message names it."""


class Host:
    """One host. Use `connect`."""

    def __init__(self, worker: Address, hosts: Any, procs: Any, agent: Any, lost_after_s: float) -> None:
        """`worker` is where its worker listens, `hosts` and `procs` are what the actor `agent` lives in."""
        self.worker = worker
        self.lost: str | None = None
        """Why this host is lost; None while it answers."""
        self.facts: HostFacts
        self.states: Mapping[str, RankStates] = {}
        """Mesh -> its processes on this host, as they were a second ago."""
        self.models = asyncio.Lock()
        """Held while a model of this host is looked at or copied."""
        self.copies: dict[Path, Path] = {}
        """Logs on this host, and the files here that their lines are copied to."""
        self._hosts = hosts
        self._procs = procs
        self.agent = agent
        self.lost_after_s = lost_after_s
        """Seconds of silence after which it is lost."""
        self._offsets: dict[Path, int] = {}
        self._beats: asyncio.Task[None] | None = None
        self._lifeline: Lifeline | None = None
        self._gone = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        worker: Address,
        controller: str,
        lost_after_s: float,
        env: Mapping[str, str],
        answers_within_s: float = _CONNECT_S,
    ) -> "Host":
        """Starts the agent of a host, whose worker has to answer in time. `env` is for all processes on it.

        Raises `HostError` if that is not possible.
        """
        ignore_unhandled_faults()
        host: Host | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                hosts = attach_to_workers(ca="trust_all_connections", workers=[str(worker)], name="host")
                await _answered(hosts.initialized, worker, answers_within_s)
                command = default_bootstrap_cmd().with_env({**env, CONTROLLER_VARIABLE: controller})
                procs = hosts.spawn_procs(per_host={"gpus": 1}, name="agent", bootstrap_command=command)
                agent = procs.spawn("agent", HostAgent, controller, lost_after_s)
                host = cls(worker, hosts, procs, agent, lost_after_s)
                host._lifeline = Lifeline(own_address_towards(worker.host))
                await agent.hold.call_one(host._lifeline.end)
                host.facts = await agent.facts.call_one(resolve(worker.host))
        except BaseException as error:
            if host is not None:
                await host.stop()
            if isinstance(error, ActorError):
                raise HostError(f"{worker.host}: it cannot connect back to this host: {error.exception}") from error
            if isinstance(error, TimeoutError | RuntimeError | ValueError | SupervisionError) and not isinstance(
                error, HostError
            ):
                raise HostError(f"{worker.host}: no agent could be started there: {_first_lines(error)}") from error
            raise
        host.watch()
        return host

    @property
    def name(self) -> str:
        """The name of the host, as the user wrote it."""
        return self.worker.host

    async def ask(self, question: Callable[..., T], *args: object, within_s: float = _CONNECT_S) -> T:
        """Calls a function of an importable module there. Raises its exceptions, and `HostLostError`."""
        return await self._answer(self.agent.ask.call_one(question, *args), within_s)

    async def receive_model(self, offer: ModelOffer, within_s: float) -> None:
        """Has the host fetch a model from here. Raises as `model_copies.receive_model`, and `HostLostError`."""
        await self._answer(self.agent.receive_model.call_one(offer), within_s)

    async def _answer(self, call: Awaitable[T], within_s: float) -> T:
        tasks = asyncio.ensure_future(awaited(call)), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            raise HostLostError(self.name, self.lost or f"it has not answered a question for {within_s:g} s")
        except ActorError as error:
            raise error.exception from None
        except SupervisionError as error:
            raise HostLostError(self.name, f"it has not answered a question: {_first_lines(error)}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self) -> None:
        """Begins to ask for signs of life, until the host is lost."""
        self._beats = asyncio.create_task(self._watch())
        self._beats.add_done_callback(self._watched)

    async def refresh(self, within_s: float = 2 * _BEAT_S) -> None:
        """Brings `states` and the copies of logs up to date, if the host answers soon enough."""
        if self.lost is None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(within_s):
                    self._take(*await self._beat())

    def lose(self, why: str) -> None:
        """Gives the host up. Its agent ends what runs there, as soon as it notices or can."""
        if self.lost is None:
            self.lost = why
            self._gone.set()
            if self._beats is not None:
                self._beats.cancel()
            if self._lifeline is not None:
                self._lifeline.cut()

    async def stop(self) -> None:
        """Ends the agent. Returns within seconds, even if the host does not answer. May be called again."""
        if self._beats is not None:
            self._beats.cancel()
        for end in (self._procs.stop, self._hosts.stop) if self.lost is None else ():
            with contextlib.suppress(Exception):
                await asyncio.wait_for(awaited(end()), _STOP_S)
        self.lose("it is not used any more")

    def _watched(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self.lose(f"it cannot be watched any more: {type(error).__name__}: {_first_lines(error)}")

    async def _beat(self) -> tuple[Mapping[Path, int], Beat]:
        """A sign of life, and the offsets in logs for which it was asked."""
        offsets = {log: self._offsets.get(log, 0) for log in self.copies}
        return offsets, await self.agent.beat.call_one(offsets)

    def _begin_beat(self) -> asyncio.Task[tuple[Mapping[Path, int], Beat]]:
        beat = asyncio.create_task(self._beat())
        # One that is under way when the host is given up fails, and asyncio would print its exception.
        beat.add_done_callback(lambda done: done.cancelled() or done.exception())
        return beat

    async def _watch(self) -> None:
        """Asks for signs of life until the host is lost."""
        silent_s, beat, failure = 0.0, self._begin_beat(), ""
        clock = asyncio.get_running_loop().time
        while silent_s < self.lost_after_s:
            before = clock()
            await asyncio.wait({beat}, timeout=_BEAT_S)
            if beat.done():
                if (error := beat.exception()) is None:
                    self._take(*beat.result())
                    silent_s, failure = 0.0, ""
                else:
                    failure = _first_lines(error)
                await asyncio.sleep(_BEAT_S - min(clock() - before, _BEAT_S))
                beat = self._begin_beat()
            if (silent_s > _SUSPICIOUS_S or failure) and (ended := await self._has_ended(failure)):
                return self.lose(ended)
            silent_s += min(clock() - before, _LONGEST_LOOK_S)
        self.lose(f"it has not answered for {silent_s:.0f} s")
        return None

    async def _has_ended(self, failure: str) -> str | None:
        """Whether the worker or the agent has ended for sure; a host that merely does not answer may come back."""
        accepted = await asyncio.to_thread(accepts, self.worker, _BEAT_S)
        if accepted is False:
            return f"its worker has ended: nothing listens on {self.worker} any more"
        return f"its agent has ended: {failure}" if failure and accepted else None

    def _take(self, offsets: Mapping[Path, int], beat: Beat) -> None:
        self.states = beat.meshes
        for log, data in beat.logs.items():
            copy = self.copies.get(log)
            if copy is None or self._offsets.get(log, 0) != offsets[log]:  # a beat at the same time brought it
                continue
            # What cannot be written, as on a full disk, is asked for again. Without a buffer, part of it counts too.
            with contextlib.suppress(OSError), copy.open("ab", buffering=0) as file:
                self._offsets[log] = offsets[log] + file.write(data)


async def _answered(attached: Awaitable[object], worker: Address, within_s: float) -> None:
    try:
        await asyncio.wait_for(awaited(attached), within_s)
    except TimeoutError:
        reason = f"its worker accepts connections and has not answered for {within_s:.0f} s"
        raise HostError(f"{worker.host}: {reason}; it may be stopped") from None


async def awaited(awaitable: Awaitable[T]) -> T:
    """`asyncio.wait_for` takes coroutines; Monarch's futures are awaitable, but none."""
    return await awaitable


def _first_lines(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + " ...") if len(text) > 300 else text or type(error).__name__
