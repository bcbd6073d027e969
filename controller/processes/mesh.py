"""One Monarch actor mesh: its processes, their environment and logs, how they fail and how they end.

This is the only file that knows how Monarch runs processes. The handles that are built on a `Mesh` know its actors.

    Mesh.spawn   processes with a RankProcess each -> their modules are imported -> one actor in each
    Mesh.call    of `Calls`: Rank sends bytes to the ranks' endpoints, and the answers are waited for, with a deadline
    Mesh.stop    asks the processes to end, kills them half a second later
"""

import asyncio
import atexit
import contextlib
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, TypeVar, cast

# Monarch reads these variables once, when it is imported, so they are set before the import.
# A dead process is noticed after 2 s in place of 10. Monarch keeps some memory each time it looks.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "2s")
# On an overloaded or paused host a process may not run for a while, and is not dead. Of a real death Monarch learns at
# once, and a process that hangs meets the deadline of a call, so that these timeouts, 30 s and more, are not needed.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE", "10m")
os.environ.setdefault("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 34))  # let a message carry a whole state dict

import monarch._src.actor.actor_mesh as actor_mesh
import monarch._src.actor.proc_mesh as proc_mesh
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure
from monarch._src.actor.logging import LoggingManager
from monarch.actor import Actor

from controller.processes.calls import CalledRank, Calls
from controller.processes.errors import DeadlineError, MeshError
from controller.processes.place import Place
from controller.processes.rank import Rank, answering, explained
from controller.processes.rank_processes import RankProcesses, check_no_fork, in_fork
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
        if in_fork():  # in which Monarch's own handler would wait without end
            actor_mesh.shutdown_context = lambda **_: SimpleNamespace(get=lambda **_: None)
            return
        while (remaining_s := cls.at + _DEATH_IS_TOLD_S - time.monotonic()) > 0:
            time.sleep(remaining_s)
        with contextlib.suppress(TimeoutError):  # Monarch's own handler waits for a second, and shows a traceback
            monarch.actor.shutdown_context(host_timeout=0.3).get(timeout=_SHUT_DOWN_S)


class Mesh(Calls):
    """The processes of one role, one actor in each. `actors` is the Monarch actor mesh.

    mesh = await Mesh.spawn("generator", VLLMGenerator, config, num_ranks=1, env={}, log_dir=run.logs)
    (version,) = await mesh.call("version", [()])
    """

    def __init__(
        self,
        name: str,
        procs: Any,
        actors: Any,
        processes: RankProcesses,
        deadlines: Deadlines | None = None,
        place: Place | None = None,
        host_mesh: Any = None,
    ) -> None:
        """Use `spawn`."""
        super().__init__(name, processes, deadlines or Deadlines())
        self.place = place or Place()
        """Where the processes run."""
        self._host_mesh = host_mesh
        self.actors = actors
        self._procs = procs
        self._ranks: dict[int, Rank] = {}
        self._stopped = False

    @classmethod
    async def spawn(
        cls,
        name: str,
        actor: type[Actor] | str,
        *args: object,
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
        the actor's constructor raises, all calls raise a `MeshError` with its exception in words. Raises `MeshError` if
        a process does not start, and ValueError for a TMPDIR or a limit of open files under which none can.
        """
        check_no_fork(launches=True)
        check_temporary_folder()
        allow_open_files()
        ignore_unhandled_faults(log_dir.absolute() / "controller.log")
        forward_no_output()
        log_dir.mkdir(parents=True, exist_ok=True)
        log_files = tuple(log_dir.absolute() / f"{name}-{rank}.log" for rank in range(num_ranks))
        deadlines, place = deadlines or Deadlines(), hosts or Place()
        processes, command = await place.processes(name, (), log_files), command_of_rank(place, log_files, env)
        host_mesh, per_host = place.host_mesh(name), {"gpus": num_ranks // place.num_hosts}
        _LastDeath.tell_at_exit()
        procs = host_mesh.spawn_procs(per_host, bootstrap_command=command, name=name)
        process = procs.spawn(f"{name}_process", RankProcess)
        mesh = cls(name, procs, None, processes, deadlines, place, host_mesh)
        try:
            made = await mesh._loaded(process, actor, loads)
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

    async def _loaded(self, process: Any, actor: type[Actor] | str, loads: Sequence[str]) -> type[Actor]:
        """The class of the actors, once the processes have their modules. Their ids come first, for kills."""
        asked, loaded = process.pid.call(), None
        if isinstance(actor, str):
            loaded = process.load.call([actor.partition(":")[0], *loads])
        pids = tuple((await self.answer("start", asked)).values())
        async with asyncio.timeout(self.deadlines.first_s):
            self.processes = await self.place.processes(self.name, pids, self.processes.log_files)
        if loaded is None:
            return cast(type[Actor], actor)
        with without_garbage_collection():
            made = resolve_name(cast(str, actor))
        await self.answer("start", loaded)
        return made

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return len(self.processes.log_files)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in the order of the ranks."""
        return self.processes.pids

    def rank(self, index: int) -> CalledRank:
        """Where calls to one rank are sent."""
        if index not in self._ranks:  # slicing takes as long as a call, and Monarch never frees its slices
            self._ranks[index] = Rank(self.name, self.actor(index))
        return self._ranks[index]

    def actor(self, index: int) -> Any:
        """Monarch's own handle of the actor of one rank, which other processes can be given."""
        return self.actors.slice(**self.place.coordinates(index, self.num_ranks))

    async def answer(self, verb: str, call: Awaitable[T]) -> T:
        """The answer to a call of Monarch's own, for which is waited as for ours; for actors that are no rank's."""
        check_no_fork()
        return (await self.wait(verb, {None: _explained(call, self.name)}, varies=True))[0]

    async def stop(self) -> None:
        """Ends every process: asks them to stop, and kills them half a second later. May be called again."""
        if self._stopped or in_fork():  # a fork's copy leaves the processes to their parent
            return
        self._stopped = True
        self._packer.shutdown(wait=False)
        patience_s = _STOP_TIMEOUT_S if self.failure is None else _KILLED_STOP_TIMEOUT_S
        self.failure = self.failure or MeshError(self.name, "it was stopped, and takes no more calls")
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_explained(self._procs.stop(), self.name), patience_s)
        finally:
            self.kill()
        await self.processes.ended(_GONE_S)
        for rank in self._ranks.values():
            rank.close()
        await self.place.release(self._host_mesh)

    def kill(self) -> None:
        """Kills every process that is still running."""
        self._stopped = True
        if self.processes.kill():
            _LastDeath.at = time.monotonic()


async def _explained(call: Awaitable[T], mesh: str) -> T:
    """Monarch's answer, with its errors as `explained` has them. asyncio takes coroutines, not Monarch's futures."""
    try:
        return await call
    except Exception as error:
        raise explained(error, mesh) from None


class _NoForwarding(LoggingManager):
    """Starts no actors that forward output, and has nothing to flush."""

    async def init(self, proc_mesh: object, stream_to_client: bool) -> None:
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
