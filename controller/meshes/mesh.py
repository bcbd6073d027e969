"""One Monarch actor mesh: its processes, their environment and logs, how they fail and how they end.

This is the only file that knows how Monarch runs processes. The handles that are built on a `Mesh` know its actors.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

# Monarch reads these variables once, when it is imported, so they are set before the import.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")  # notice a dead process after 1 s, not 10 s
# On an overloaded host the controller may not run for a while; its meshes must not take it for dead then. If it really
# dies, they end at once, whatever these timeouts are.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "10m")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 34))  # let a message carry a whole state dict

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import Actor, ActorError, default_bootstrap_cmd, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

from controller.meshes.errors import DeadlineError, MeshError

T = TypeVar("T")

_LOG_FILE = "OWNLOOP_LOG_FILE"
_STOP_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 20


class _PidActor(Actor):
    """Knows the id of the operating-system process that a rank runs in."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


def _prepare_process() -> None:
    """Sends this process's standard output and error to its log file, and leaves signals to the controller.

    Descriptors 1 and 2 themselves are replaced, so that the output of native libraries goes there too.
    """
    # Slurm and systemd send SIGTERM to every process of a job at once. A process of a mesh has to live until the
    # controller has saved the run. Python sets handlers in the main thread only, which is not this one.
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        libc.signal(number, int(signal.SIG_IGN))
    log = os.open(os.environ[_LOG_FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _ignore_unhandled_fault(failure: MeshFailure) -> None:
    """Keeps the controller alive when a process dies. Without it Monarch ends the controller.

    Calls to the dead process raise `MeshError` instead.
    """
    print(failure.report(), flush=True)


class Mesh:
    """The processes of one role, one actor in each.

    `actors` is the Monarch actor mesh. Every call to it goes through `answer`, which turns Monarch's errors into ours:

        mesh = await Mesh.spawn("generator", VLLMGenerator, config, num_ranks=1, env={}, log_dir=run.logs)
        version = await mesh.answer(mesh.rank(0).version.call_one())
    """

    def __init__(self, name: str, procs: Any, actors: Any, pids: tuple[int, ...], log_files: tuple[Path, ...]) -> None:
        """Use `spawn`."""
        self.name = name
        self.actors = actors
        self.pids = pids
        self.log_files = log_files
        self._procs = procs
        self._stopped = False

    @classmethod
    async def spawn(
        cls, name: str, actor: type[Actor], *args: Any, num_ranks: int, env: Mapping[str, str], log_dir: Path
    ) -> "Mesh":
        """Starts `num_ranks` processes on this host, each with `actor(*args)` in it.

        `env` is set before a process imports anything; torch's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
        MASTER_PORT are set before the actor is constructed. A process's output goes to `<log_dir>/<name>-<rank>.log`.
        If the actor's constructor raises, the first call to the actor raises its exception.
        """
        monarch.actor.unhandled_fault_hook = _ignore_unhandled_fault
        log_dir.mkdir(parents=True, exist_ok=True)
        log_files = tuple(log_dir.absolute() / f"{name}-{rank}.log" for rank in range(num_ranks))

        def bootstrap_command(point: Any) -> BootstrapCommand:
            return default_bootstrap_cmd().with_env({**env, _LOG_FILE: str(log_files[point.rank])})

        procs = this_host().spawn_procs(
            per_host={"gpus": num_ranks}, bootstrap=_prepare_process, bootstrap_command=bootstrap_command, name=name
        )
        pid_actors = procs.spawn(f"{name}_process", _PidActor)
        mesh = cls(name, procs, None, (), log_files)
        try:
            mesh.pids = tuple((await mesh.answer(pid_actors.pid.call())).values())
            await setup_torch_elastic_env_async(procs)
            mesh.actors = procs.spawn(name, actor, *args)
        except BaseException:
            await mesh.stop()
            raise
        return mesh

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return len(self.log_files)

    def rank(self, index: int) -> Any:
        """The actor of one rank. Call its endpoints with `.call_one`."""
        return self.actors.slice(gpus=index)

    async def answer(self, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """Awaits a call to this mesh's actors.

        Raises the exception that the actor raised, `MeshError` if a process of the mesh has died, and `DeadlineError`
        if there is no answer within `timeout_s` seconds.
        """
        try:
            return await asyncio.wait_for(_as_coroutine(call), timeout_s)
        except ActorError as error:
            error.exception.add_note(f"raised in a process of {self.name!r}:\n{error.exception_formatted}")
            raise error.exception from None
        except SupervisionError as error:
            raise MeshError(self.name, f"a process died: {error}", self.log_files, self.log_tail()) from None
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            raise DeadlineError(self.name, reason, self.log_files, self.log_tail()) from None

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of every process's log."""
        tails: list[str] = []
        for path in self.log_files:
            lines = path.read_text(errors="replace").splitlines()[-num_lines:] if path.exists() else []
            tails.append("\n".join([f"[{path.name}]", *lines]))
        return "\n".join(tails)

    async def stop(self) -> None:
        """Ends every process: asks them to stop, and kills them if they have not after 5 s. May be called again."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_as_coroutine(self._procs.stop()), _STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kills every process that is still running."""
        self._stopped = True
        for pid in self.pids:
            if _is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    """`asyncio.wait_for` takes coroutines and asyncio futures; Monarch's futures are awaitable, but neither."""
    return await awaitable


def _is_child(pid: int) -> bool:
    """Whether `pid` is a child of this process. If not, the child has ended and its id may have been used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(status.rpartition(")")[2].split()[1]) == os.getpid()
