"""`Calls`: one call to the ranks of a mesh. It is sent, waited for under a deadline, and its answers are judged.

    handle --- verb, arguments of each rank ---> call: pickled, sent in the order of issue --- bytes ---> ranks
    handle <-- answers, or why there are none -- wait: all answered, failed or too late    <-- bytes ---

What unblocks a call: the answers of all ranks, or the first of these:

* a process of the mesh has died, or is stopped;
* one rank raised an exception alone. The others may never answer, because they wait for it in a collective, or have
  gone on without it, so that the ranks' states differ;
* the call has missed its deadline.

The mesh is then killed, and all of its calls raise the same `MeshError`. An exception that every rank raises is
different: the ranks agreed to end the call, their state is as it was, and the exception is raised as it is.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from controller.processes.errors import DeadlineError, HostLostError, MeshError, ProcessDiedError
from controller.processes.rank_processes import RankProcesses, check_no_fork
from rl.deadlines import Deadlines
from rl.system.timeline import span

T = TypeVar("T")
Arguments = Sequence[tuple[object, ...] | None]
"""Of one call, for each rank. A rank with None, and one beyond the end, is not called."""
Wait = Literal["queued", "at once", "watched"]
"""When a call's clock runs. Actors execute "queued" calls in order, and the clock of each starts with the answer of the
one before. The clock of a call that is executed "at once" starts at once. A "watched" call has no deadline: its handle
asks for signs of progress by other calls.

A "queued" call that is cancelled is still executed. Its clock then runs while the next call waits for it."""

_TICK_S = 1.0
_GONE_S = 1.0  # within which the kernel takes a dead process down
_DEATH_GRACE_S = 3.0  # within which Monarch says how a process died


@dataclass(slots=True, eq=False)
class _Call:
    verb: str
    size: float
    varies: bool
    wait: Wait
    answers: dict[int | None, asyncio.Future[Any]]
    needs: "Callable[[], Sequence[Calls]]"
    asked: float
    abandoned: bool = False
    """Whether its caller was cancelled, and the ranks still execute it."""
    waited_s: float = 0.0
    """Seconds that count against its deadline."""
    troubled_s: float = 0.0
    """Seconds since something went wrong."""

    @property
    def unanswered(self) -> list[int | None]:
        return [rank for rank, answer in self.answers.items() if not answer.done()]

    @property
    def errors(self) -> dict[int | None, BaseException]:
        done = {rank: answer for rank, answer in self.answers.items() if answer.done() and not answer.cancelled()}
        return {rank: error for rank, answer in done.items() if (error := answer.exception()) is not None}

    def finished(self) -> bool:
        return not self.unanswered and not self.errors

    def ended_alike(self) -> bool:
        """Whether all ranks have ended it, either with an answer or with an exception."""
        return not self.unanswered and len(self.errors) in (0, len(self.answers))


class CalledRank(Protocol):
    """One rank of a mesh, to which calls are sent; `controller.processes.rank.Rank` is it."""

    def packed(self, verb: str, args: tuple[object, ...]) -> object:
        """The arguments of a call as they are sent. Called in any thread. Raises `ArgumentsError`."""
        ...

    def send(self, verb: str, arguments: Any) -> "asyncio.Future[Any]":
        """Sends a call with packed arguments at once. The future raises the actor's error, or `ProcessDiedError`."""
        ...


class Calls:
    """The calls to one mesh."""

    def __init__(self, name: str, processes: RankProcesses, deadlines: Deadlines) -> None:
        """`name` is the mesh's."""
        self.name = name
        self.processes = processes
        self.deadlines = deadlines
        self.failure: MeshError | None = None
        """Why the mesh was killed."""
        self.is_consequence: Callable[[BaseException], bool] = is_connection_error
        """Whether a rank raised an error because another rank failed."""
        self.grace_s = 5.0
        """Seconds within which all ranks raise their exceptions if they agreed to end a call."""
        self.gate: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext
        """Entered by each call that uses memory of GPUs. Shared GPUs put their own gate here; see colocated.py."""
        self._order = asyncio.Lock()  # fair: calls are sent in the order in which they came here
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}_arguments")
        self._failed: asyncio.Future[None] | None = None
        self._under_way: list[_Call] = []
        self._slowest: dict[str, tuple[float, float]] = {}  # seconds and largest size of each verb so far

    def rank(self, index: int) -> CalledRank:
        """Where calls to one rank are sent."""
        raise NotImplementedError(f"{self.name} has no rank {index} yet")

    async def call(
        self,
        verb: str,
        arguments: Arguments | Callable[[], Arguments],
        *,
        size: Callable[[], float] = float,
        varies: bool = False,
        wait: Wait = "queued",
        needs_memory: bool = True,
        needs: "Callable[[], Sequence[Calls]]" = tuple,
    ) -> list[Any]:
        """Calls the endpoint `verb` of every rank, each with its `arguments`, and returns the answers.

        All ranks get calls in the order of issue. Large `arguments` are a function: a thread calls it and pickles what
        it returns, so the event loop stays free, and later calls wait until this one is sent. A call is not sent if the
        function raises, which is raised here, or if the caller is cancelled before. With `needs_memory`, a mesh that
        shares its GPUs waits first until its side may use them.

        `size` returns any measure of the work in a call, and is asked once it is sent. The times of a verb that
        `varies` do not depend on earlier ones, so each of its calls has the deadline of a first one. `needs` returns
        the meshes without which these ranks cannot answer now.

        Raises what the module's docstring says, and `ArgumentsError`.
        """
        async with self.gate() if needs_memory else contextlib.nullcontext():
            async with self._order:
                check_no_fork()
                if callable(arguments):
                    if self.failure is not None:  # the packer of a stopped mesh takes nothing
                        raise self.failure.again()
                    loop = asyncio.get_running_loop()
                    packed = await loop.run_in_executor(self._packer, self._packed, verb, arguments)
                else:
                    packed = self._packed(verb, arguments)
                answers = {rank: self.rank(rank).send(verb, each) for rank, each in packed.items()}
            return await self.wait(verb, answers, size=size(), varies=varies, wait=wait, needs=needs)

    def tell(self, verb: str, *args: object) -> None:
        """Calls an endpoint of rank 0. Its result or exception is dropped."""
        self.rank(0).send(verb, self.rank(0).packed(verb, args)).cancel()

    def _packed(self, verb: str, arguments: Arguments | Callable[[], Arguments]) -> dict[int, object]:
        of_ranks = arguments() if callable(arguments) else arguments
        return {rank: self.rank(rank).packed(verb, args) for rank, args in enumerate(of_ranks) if args is not None}

    async def wait(
        self,
        verb: str,
        answers: "Mapping[int, Awaitable[T]] | Mapping[None, Awaitable[T]]",
        *,
        size: float = 0.0,
        varies: bool = False,
        wait: Wait = "queued",
        needs: "Callable[[], Sequence[Calls]]" = tuple,
    ) -> list[T]:
        """The answers that `call` waits for, of each rank that it was sent to; the key None stands for several ranks.

        The answers raise the actors' exceptions, and `ProcessDiedError`.
        """
        futures: dict[int | None, asyncio.Future[T]] = {
            rank: asyncio.ensure_future(answer) for rank, answer in answers.items()
        }
        call = _Call(verb, size, varies, wait, futures, needs, asyncio.get_running_loop().time())
        self._under_way.append(call)
        try:
            with contextlib.nullcontext() if verb == "status" else span(self.name, verb):
                while not call.finished():
                    await self._tick(call)
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        finally:
            if not call.abandoned:
                self._under_way.remove(call)
                for answer in futures.values():
                    answer.cancel()
        if wait != "watched":
            slowest_s, largest = self._slowest.get(verb, (0.0, 0.0))
            self._slowest[verb] = (max(slowest_s, call.waited_s), max(largest, size))
        return [answer.result() for answer in futures.values()]

    def fail(self, error: MeshError) -> None:
        """Kills the mesh. `error` is what all calls under way and all later ones raise."""
        if self.failure is None:
            self.failure = error
            self.processes.kill()
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(None)

    def check_alive(self, verb: str) -> None:
        """Raises `MeshError` if the mesh was killed, or a process of it has died."""
        self.processes.look(at_most_s=0.0)
        if (error := self.failure or self._process_failure(verb)) is not None:
            raise error.again()

    def _limit_s(self, call: _Call) -> float:
        """The deadline of a call."""
        if call.verb not in self._slowest:
            return self.deadlines.first_s
        slowest_s, largest = self._slowest[call.verb]
        limit_s = self.deadlines.limit_s(slowest_s)
        return max(limit_s, self.deadlines.first_s) if call.varies or call.size > 2 * largest else limit_s

    def _abandon(self, call: _Call) -> None:
        """Keeps a call that was cancelled among those under way for as long as the ranks execute it."""

        def look(_: object) -> None:
            if call.ended_alike() and call in self._under_way:
                self._under_way.remove(call)

        call.abandoned = call.wait == "queued" and self.failure is None and not call.ended_alike()
        if call.abandoned:
            for answer in call.answers.values():
                answer.add_done_callback(look)

    async def _tick(self, call: _Call) -> None:
        """Waits for an answer, but not for long, and raises if there is a reason not to wait any longer."""
        if self.failure is not None:
            raise self.failure.again()
        loop = asyncio.get_running_loop()
        if self._failed is None or self._failed.get_loop() is not loop:
            self._failed = loop.create_future()
        executed = self._executed(call)
        errors_before, started = len(executed.errors) if executed else 0, loop.time()
        unanswered = {call.answers[rank] for rank in call.unanswered}
        # Thousands of watched calls may be under way, so that they do not look at the processes each.
        idle = call.wait == "watched" and not call.errors and not call.needs()
        await asyncio.wait(
            {*unanswered, self._failed}, timeout=None if idle else _TICK_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self.failure is not None:
            return
        # What counts is the time in which this process ran: if it was stopped, the ranks may have been too.
        elapsed = min(loop.time() - started, 2 * _TICK_S)
        if executed is not None:
            executed.waited_s += elapsed
            executed.troubled_s += elapsed if errors_before or self.processes.gone else 0.0
        if call.finished() or (not call.errors and elapsed < _TICK_S / 2):  # looking at processes costs 0.1 ms each
            return
        for each in (self, *call.needs()):
            each.processes.look(at_most_s=2 * _TICK_S)
        if executed is not None and executed.abandoned and not executed.ended_alike():
            await self._judge(executed)
        await self._judge(call)

    def _executed(self, call: _Call) -> _Call | None:
        """The call whose clock runs while `call` waits: itself, or one before it that was cancelled.

        None if it is another one that somebody waits for.
        """
        if call.wait != "queued":
            return call
        queued = [each for each in self._under_way if each.wait == "queued"]
        return queued[0] if call is next(each for each in queued if not each.abandoned) else None

    async def _judge(self, call: _Call) -> None:
        """Raises if there is a reason not to wait any longer for a call."""
        if not self.processes.gone and any(isinstance(error, ProcessDiedError) for error in call.errors.values()):
            loop = asyncio.get_running_loop()
            end = loop.time() + _GONE_S  # Monarch may hear of a death before the kernel has taken the process down
            is_over = False
            while not self.processes.gone and not is_over:
                is_over = loop.time() >= end  # looked at once more, as this process may have been stopped
                await self.processes.fetch_states()  # which process it was
                self.processes.look(at_most_s=0.0)
                await asyncio.sleep(0 if self.processes.gone else 0.02)
        for other in call.needs():
            error = other.failure or other._process_failure(call.verb)
            if error is not None:
                if other.failure is None:
                    error = await other.end(error, () if error.rank is None else [error.rank])
                if call.unanswered:  # otherwise these ranks are as they were
                    self.fail(error)
                raise error.again()
        if (error := self._process_failure(call.verb, call)) is None:
            self._raise_common(call)
            error = self._lone_failure(call) or self._deadline_failure(call)
        if error is not None:
            silent = [rank for rank in call.unanswered if rank is not None]
            raise await self.end(error, silent or range(len(self.processes.pids)))

    async def end(self, error: MeshError, silent: Iterable[int]) -> MeshError:
        """Kills the mesh because of `error`, and returns it with logs and with the stacks of the ranks in `silent`."""
        await self.processes.fetch_states()
        self.processes.note(silent, error.reason)
        tail = self.processes.log_tail()
        stacks = await self.processes.stacks(silent)
        error = error.again(self.processes.log_files, f"{stacks}\n{tail}" if stacks else tail)
        self.fail(error)
        assert self.failure is not None
        return self.failure.again()  # that of another call, if it was found in the meantime

    def _process_failure(self, verb: str, call: _Call | None = None) -> MeshError | None:
        """Whether a process has died or is stopped."""
        processes = self.processes
        if processes.lost_host is not None:
            rank = next(iter(processes.gone), None)
            reason = f"{processes.lost_host}; {processes.name(rank)} was there, in {verb}"
            return HostLostError(self.name, reason, rank=rank, verb=verb)
        died = [error for error in call.errors.values() if isinstance(error, ProcessDiedError)] if call else []
        if died or (processes.gone and (call is None or call.troubled_s >= _DEATH_GRACE_S)):
            rank = next(iter(processes.gone), None)
            how = f": {died[0]}" if died else ""
            return MeshError(self.name, f"{processes.name(rank)} died in {verb}{how}", rank=rank, verb=verb)
        for rank, stopped_s in processes.stopped_s.items():
            if stopped_s >= self.deadlines.stopped_s:
                reason = f"{processes.name(rank)} has been stopped (SIGSTOP) for {stopped_s:.0f} s"
                reason += f"; {self._who_waits(call)}" if call else ""
                return DeadlineError(self.name, reason, rank=rank, verb=verb)
        return None

    def _raise_common(self, call: _Call) -> None:
        """Raises the exception that caused a call to end on every rank, if all of them have raised one."""
        errors = call.errors
        if len(errors) == len(call.answers) and not any(map(is_connection_error, errors.values())):
            raise self._cause(errors)[1]

    def _lone_failure(self, call: _Call) -> MeshError | None:
        """One rank's exception that the others do not share."""
        if not call.errors or (call.unanswered and call.troubled_s < self.grace_s):
            return None
        rank, cause = self._cause(call.errors)
        if call.troubled_s < _DEATH_GRACE_S and (self.processes.gone or is_connection_error(cause)):
            return None  # the process that died is about to be found
        silent = ", ".join(self.processes.name(rank) for rank in call.unanswered)
        others = f"{silent} did not answer" if silent else "its state is not that of the other ranks now"
        reason = f"{self.processes.name(rank)} raised {type(cause).__name__} in {call.verb}: {cause}; {others}"
        error = MeshError(self.name, reason, rank=rank, verb=call.verb)
        error.__cause__ = cause
        return error

    def _deadline_failure(self, call: _Call) -> MeshError | None:
        limit_s = self._limit_s(call)
        if call.wait == "watched" or call.waited_s < limit_s:
            return None
        slowest_s = self._slowest.get(call.verb, (0.0, 0.0))[0]
        why = f"the slowest so far took {slowest_s:.1f} s" if call.verb in self._slowest else "it was the first"
        silent = call.unanswered
        names = ", ".join(self.processes.name(rank) for rank in silent)
        reason = f"{names} did not answer {call.verb} within its deadline of {limit_s:g} s ({why}; see `deadlines`)"
        return DeadlineError(self.name, reason, rank=silent[0] if len(silent) == 1 else None, verb=call.verb)

    def _cause(self, errors: Mapping[int | None, BaseException]) -> tuple[int | None, BaseException]:
        """The error that explains the others, and its rank."""
        ranked = sorted(errors.items(), key=lambda item: is_connection_error(item[1]) or self.is_consequence(item[1]))
        return ranked[0]

    def _who_waits(self, call: _Call) -> str:
        # The ranks are busy with the oldest call: later ones wait for it, or ask about its state.
        oldest = next(iter(self._under_way), call)
        silent = [self.processes.name(rank) for rank in oldest.unanswered if rank is not None]
        waiting = f"; {', '.join(silent)} did not answer" if len(silent) > 1 else ""
        waited_s = asyncio.get_running_loop().time() - oldest.asked
        return f"the controller has waited {waited_s:.0f} s for {oldest.verb}{waiting}"


def is_connection_error(error: BaseException) -> bool:
    """Whether an error only says that a process at the other end of a collective is gone or gave up."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        ("gloo" in text and ("Connection" in text or "Timed out" in text or "peer" in text))
        or "NCCL" in text
        or "ProcessGroup" in text
    )
