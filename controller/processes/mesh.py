"""One Monarch actor mesh: its processes, their environment and logs, how they fail and how they end.

This is the only file that knows how Monarch runs processes. The handles that are built on a `Mesh` know its actors.

    Mesh.spawn   processes with a RankProcess each -> their modules are imported -> one actor in each
    Mesh.call    Rank (sends bytes) -> the ranks' endpoints; Calls waits for the answers, with a deadline
    Mesh.stop    asks the processes to end, kills them half a second later
"""

import asyncio
import atexit
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, TypeVar, cast

# Monarch reads these variables once, when it is imported, so they are set before the import.
# A dead process is noticed after 2 s in place of 10. Monarch keeps some memory each time it looks.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "2s")
# On an overloaded host the controller may not run for a while; its meshes must not take it for dead then. If it really
# dies, they end at once; these timeouts do not matter then.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 34))  # let a message carry a whole state dict

import monarch._src.actor.actor_mesh as actor_mesh
import monarch._src.actor.proc_mesh as proc_mesh
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch._src.actor.logging import LoggingManager
from monarch.actor import Actor, ActorError

from controller.processes.calls import Calls, ProcessDiedError, Wait
from controller.processes.errors import DeadlineError, MeshError
from controller.processes.place import Place, ThisHost
from controller.processes.rank import Rank, answering
from controller.processes.rank_processes import RankProcesses
from controller.processes.rank_start import RankProcess, command_of_rank, prepare_ranks
from rl.deadlines import Deadlines
from rl.system.disk import check_temporary_folder
from rl.system.hardware import allow_open_files, without_garbage_collection

T = TypeVar("T")

_STOP_TIMEOUT_S = 0.5  # they have nothing left to write, and an interpreter with vLLM in it takes seconds to end
_GONE_S = 2.0
_KILLED_STOP_TIMEOUT_S = 1.0  # for Monarch to forget processes that have been killed
_DEATH_IS_TOLD_S = 2.0  # within which Monarch reports a death to this process
_SHUT_DOWN_S = 10.0  # of a client on a busy machine
_NOT_STARTED = "error creating proc"


def _ignore_unhandled_fault(failure: MeshFailure) -> None:
    """Keeps the controller alive when a process dies. Without it Monarch ends the controller.

    Calls to the dead process raise `MeshError` instead. Monarch's report goes to a log: it also
    names processes that this one killed, which would be noise in a terminal or a notebook.
    """
    _LastDeath.at = time.monotonic()
    if _LastDeath.log_file is None:
        print(failure.report(), flush=True)
        return
    with contextlib.suppress(OSError), _LastDeath.log_file.open("a", encoding="utf-8") as log:  # it may be gone
        print(failure.report(), file=log)


def ignore_unhandled_faults(log_file: Path | None = None) -> None:
    """Has Monarch tell this process of deaths, instead of ending it. From now on, its reports go to `log_file`."""
    _LastDeath.log_file = log_file or _LastDeath.log_file
    monarch.actor.unhandled_fault_hook = _ignore_unhandled_fault


class _Launches:
    """The process that has launched meshes. Its threads, on which Monarch's answers come, do not outlive a fork."""

    pid: int | None = None

    @classmethod
    def in_fork(cls) -> bool:
        """Whether this is a fork of that process."""
        return cls.pid not in (None, os.getpid())

    @classmethod
    def begin(cls) -> None:
        """Raises ValueError as `check` does, and for a TMPDIR or a limit of open files under which none can start."""
        cls.check()
        check_temporary_folder()
        allow_open_files()

    @classmethod
    def check(cls) -> None:
        """Raises ValueError in a fork of that process, where every call would hang."""
        cls.pid = cls.pid or os.getpid()
        if cls.in_fork():
            raise ValueError(
                f"this process ({os.getpid()}) is a fork of process {cls.pid}, which had launched processes by then; "
                "neither they nor new ones answer here. Launch in that process, or start this one anew, as by "
                'multiprocessing.get_context("spawn")'
            )


class _LastDeath:
    """When this process last killed, or heard of the death of, another."""

    at = -_DEATH_IS_TOLD_S
    log_file: Path | None = None
    """Where the deaths of the newest mesh are reported."""

    @classmethod
    def tell_at_exit(cls) -> None:
        """Registers the next method last, so that it runs first: before Monarch's, which ends its client."""
        atexit.unregister(cls.wait_until_told)
        atexit.register(cls.wait_until_told)

    @classmethod
    def wait_until_told(cls) -> None:
        """Run before the interpreter ends: Monarch ends it with status 1 if it has a death to tell of after that.

        Shuts Monarch's client down.
        """
        if _Launches.in_fork():  # in which Monarch's own handler would wait without end
            actor_mesh.shutdown_context = lambda **_: SimpleNamespace(get=lambda **_: None)
            return
        while (remaining_s := cls.at + _DEATH_IS_TOLD_S - time.monotonic()) > 0:
            time.sleep(remaining_s)
        with contextlib.suppress(TimeoutError):  # Monarch's own handler waits for a second, and shows a traceback
            monarch.actor.shutdown_context(host_timeout=0.3).get(timeout=_SHUT_DOWN_S)


class Mesh:
    """The processes of one role, one actor in each.

    `actors` is the Monarch actor mesh, and `rank` the actor of one process. Every call to them goes through `answer` or
    `answers`, which have a deadline and turn Monarch's errors into ours:

        mesh = await Mesh.spawn("generator", VLLMGenerator, config, num_ranks=1, env={}, log_dir=run.logs)
        version = await mesh.answer(mesh.rank(0).version.call_one(), "version")
    """

    def __init__(
        self,
        name: str,
        procs: Any,
        actors: Any,
        pids: Sequence[int],
        log_files: tuple[Path, ...],
        place: Place | None = None,
        host_mesh: Any = None,
    ) -> None:
        """Use `spawn`."""
        self.name = name
        self.place = place or ThisHost()
        """Where the processes run."""
        self._host_mesh = host_mesh
        self.actors = actors
        self.log_files = log_files
        self.calls = Calls(name, RankProcesses(pids, log_files), Deadlines())
        self._procs = procs
        self._ranks: dict[int, Rank] = {}
        self._order = asyncio.Lock()  # fair: calls are sent in the order in which they came here
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}_arguments")
        self._stopped = False
        self.gate: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext
        """Entered by each call that uses memory of GPUs. Shared GPUs put their own gate here; see colocated.py."""

    @classmethod
    async def spawn(
        cls,
        name: str,
        actor: type[Actor] | str,
        *args: Any,
        num_ranks: int,
        env: Mapping[str, str],
        log_dir: Path,
        deadlines: Deadlines | None = None,
        hosts: Place | None = None,
        loads: Sequence[str] = (),
    ) -> "Mesh":
        """Starts `num_ranks` processes, each with `actor(*args)` in it, on `hosts` or else on this host.

        `actor` may be a name, "module:class". Then the processes import its module, and those in `loads`, while this
        one imports it.

        `env` is set before a process imports anything; torch's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
        MASTER_PORT are set before the actor is constructed. A process's output goes to `<log_dir>/<name>-<rank>.log`.
        On other hosts the log is a copy, at most a second old. Reports of deaths go to `<log_dir>/controller.log`. If
        the actor's constructor raises, the first call to the actor raises its exception. Raises `MeshError` if a
        process does not start, and ValueError for a TMPDIR or a limit of open files under which none can.
        """
        _Launches.begin()
        ignore_unhandled_faults(log_dir.absolute() / "controller.log")
        forward_no_output()
        log_dir.mkdir(parents=True, exist_ok=True)
        log_files = tuple(log_dir.absolute() / f"{name}-{rank}.log" for rank in range(num_ranks))
        deadlines, place = deadlines or Deadlines(), hosts or ThisHost()
        processes, command = await place.processes(name, (), log_files), command_of_rank(place, log_files, env)
        host_mesh, per_host = place.host_mesh(name), {"gpus": num_ranks // place.num_hosts}
        _LastDeath.tell_at_exit()
        procs = host_mesh.spawn_procs(per_host, bootstrap_command=command, name=name)
        process = procs.spawn(f"{name}_process", RankProcess)
        mesh = cls(name, procs, None, (), log_files, place, host_mesh)
        mesh.calls = Calls(name, processes, deadlines)
        try:
            made = await mesh._loaded(process, actor, loads, deadlines)
            async with asyncio.timeout(deadlines.first_s):
                await prepare_ranks(process, place.address)
            mesh.actors = procs.spawn(name, answering(made), *args)
        except TimeoutError:
            await mesh.stop()
            reason = f"its processes did not start within {deadlines.first_s:g} s"
            raise DeadlineError(name, reason, verb="start") from None
        except BaseException:
            await mesh.stop()
            raise
        return mesh

    async def _loaded(
        self, process: Any, actor: type[Actor] | str, loads: Sequence[str], deadlines: Deadlines
    ) -> type[Actor]:
        """The class of the actors, once the processes have their modules. Their ids come first, for kills."""
        asked, loaded = process.pid.call(), None
        if isinstance(actor, str):
            loaded = process.load.call([actor.partition(":")[0], *loads])
        pids = tuple((await self.answer(asked, "start")).values())
        async with asyncio.timeout(deadlines.first_s):
            self.calls = Calls(self.name, await self.place.processes(self.name, pids, self.log_files), deadlines)
        if loaded is None:
            return cast(type[Actor], actor)
        with without_garbage_collection():
            made = resolve_name(cast(str, actor))
        await self.answer(loaded, "start")
        return made

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return len(self.log_files)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in the order of the ranks."""
        return self.calls.processes.pids

    def rank(self, index: int) -> Any:
        """The actor of one rank, a `Rank`. Call its endpoints with `.call_one`."""
        if index not in self._ranks:  # slicing takes as long as a call, and Monarch never frees its slices
            self._ranks[index] = Rank(self.actor(index))
        return self._ranks[index]

    def actor(self, index: int) -> Any:
        """Monarch's own handle of the actor of one rank, which other processes can be given."""
        return self.actors.slice(**self.place.coordinates(index, self.num_ranks))

    async def call(
        self,
        verb: str,
        arguments: Sequence[tuple[Any, ...]] | Callable[[], Sequence[tuple[Any, ...]]],
        *,
        size: Callable[[], float] = float,
        varies: bool = False,
        needs_memory: bool = True,
        needs: "Callable[[], Sequence[Mesh]]" = tuple,
    ) -> list[Any]:
        """Calls the endpoint `verb` of every rank, each with its `arguments`, and returns the answers; see `answers`.

        All ranks get calls in the order of issue. Large `arguments` are a function: a thread calls it and pickles what
        it returns, so the event loop stays free, and later calls wait until this one is sent. A call is not sent if the
        function raises, which is raised here, or if the caller is cancelled before. `size` is asked for afterwards.
        With `needs_memory`, a mesh that shares its GPUs waits first until its side may use them.
        """
        async with self.gate() if needs_memory else contextlib.nullcontext():
            async with self._order:
                _Launches.check()
                calls = await self._sent(verb, arguments)
            return await self.answers(calls, verb, size=size(), varies=varies, needs=needs)

    async def _sent(
        self, verb: str, arguments: Sequence[tuple[Any, ...]] | Callable[[], Sequence[tuple[Any, ...]]]
    ) -> list[Awaitable[Any]]:
        if not callable(arguments):
            return [getattr(self.rank(rank), verb).call_one(*args) for rank, args in enumerate(arguments)]
        endpoints = [getattr(self.rank(rank), verb) for rank in range(self.num_ranks)]

        def packed() -> list[Callable[[], Awaitable[Any]]]:
            return [endpoint.packed(*args) for endpoint, args in zip(endpoints, arguments(), strict=True)]

        sends = await asyncio.get_running_loop().run_in_executor(self._packer, packed)
        return [send() for send in sends]

    async def answer(
        self,
        call: Awaitable[T],
        verb: str,
        *,
        rank: int | None = None,
        wait: Wait = "queued",
        needs: "Callable[[], Sequence[Mesh]]" = tuple,
    ) -> T:
        """Awaits a call to one rank, or with `.call` to all of them; see `Calls.answers`."""
        _Launches.check()
        calls = {rank: _unwrapped(call, self.name)}
        return (await self.calls.answers(calls, verb, wait=wait, needs=lambda: [mesh.calls for mesh in needs()]))[0]

    async def answers(
        self,
        calls: Sequence[Awaitable[T]],
        verb: str,
        *,
        size: float = 0.0,
        varies: bool = False,
        wait: Wait = "queued",
        needs: "Callable[[], Sequence[Mesh]]" = tuple,
    ) -> list[T]:
        """Awaits a call to each rank, in the order of the ranks; see `Calls.answers`."""
        _Launches.check()
        by_rank: dict[int | None, Coroutine[Any, Any, T]] = {
            rank: _unwrapped(call, self.name) for rank, call in enumerate(calls)
        }
        return await self.calls.answers(
            by_rank, verb, size=size, varies=varies, wait=wait, needs=lambda: [mesh.calls for mesh in needs()]
        )

    async def stop(self) -> None:
        """Ends every process: asks them to stop, and kills them half a second later. May be called again."""
        if self._stopped or _Launches.in_fork():  # a fork's copy leaves the processes to their parent
            return
        self._stopped = True
        self._packer.shutdown(wait=False)
        patience_s = _STOP_TIMEOUT_S if self.calls.failure is None else _KILLED_STOP_TIMEOUT_S
        self.calls.failure = self.calls.failure or MeshError(self.name, "it was stopped, and takes no more calls")
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_as_coroutine(self._procs.stop()), patience_s)
        finally:
            self.kill()
        await self.calls.processes.ended(_GONE_S)
        for rank in self._ranks.values():
            rank.close()
        await self.place.release(self._host_mesh)

    def kill(self) -> None:
        """Kills every process that is still running."""
        self._stopped = True
        if self.calls.processes.kill():
            _LastDeath.at = time.monotonic()


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    """`asyncio.wait_for` takes coroutines and asyncio futures; Monarch's futures are awaitable, but neither."""
    return await awaitable


async def _unwrapped(call: Awaitable[T], mesh: str) -> T:
    """Monarch's answer. Raises the exception that the actor raised, and `ProcessDiedError`, for Monarch's wrappers."""
    try:
        return await call
    except ActorError as error:
        error.exception.add_note(f"raised in a process of {mesh!r}:\n{error.exception_formatted}")
        raise error.exception from None
    except (SupervisionError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith(_NOT_STARTED):  # Monarch's own
            raise
        raise ProcessDiedError(how_it_died(str(error))) from None


def how_it_died(report: str) -> str:
    """Monarch's report of a death in a few words. The whole report is in the controller's log."""
    if report.startswith(_NOT_STARTED):
        return report.partition("\n")[0][:200]
    if found := re.search(r"Killed\(sig=(\d+)", report):
        number = int(found[1])
        memory = ", as the kernel does where memory is short" if number == signal.SIGKILL else ""
        return f"killed by {signal.Signals(number).name}{memory}"
    if found := re.search(r"(?:Stopped|Exited)\D*(\d+)", report):
        return f"ended with status {found[1]}"
    return report.strip().splitlines()[-1].strip()[:200]


class _NoForwarding(LoggingManager):
    """Starts no actors that forward output, and has nothing to flush."""

    async def init(self, proc_mesh: Any, stream_to_client: bool) -> None:
        """Starts nothing. The output of a process goes to its log, which it opens itself."""

    async def flush_async(self) -> None:
        """Does nothing. Monarch calls this before it stops processes."""


def forward_no_output() -> None:
    """Keeps Monarch from starting actors that forward the output of processes. Calling it again does nothing.

    Monarch starts them although forwarding is off. It polls each of them, and never frees the memory of a poll: with
    three meshes 1 MB a minute if it polls every second. Remove when Monarch starts none, or frees it;
    `tests/e2e/test_mesh.py` measures what an idle mesh keeps.
    """
    proc_mesh.LoggingManager = _NoForwarding
