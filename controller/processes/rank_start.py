"""What a rank's process does before its actor is there: it redirects its output, sets its signals, imports modules."""

import ctypes
import json
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import default_bootstrap_cmd, endpoint
from monarch.spmd import SPMDActor

from controller.processes.place import Place
from controller.processes.rank_processes import answer_stack_signal
from rl.system.hardware import without_garbage_collection

_held_ports: list[socket.socket] = []
_LOG_FILE = "OWNLOOP_LOG_FILE"
_MODULE_FOLDERS = "OWNLOOP_MODULE_FOLDERS"


class RankProcess(SPMDActor):
    """The operating-system process that a rank runs in. Its `setup_env` sets what torch wants to know of the rank."""

    def __init__(self) -> None:
        """Prepares the process. This is its first actor."""
        _prepare_process()
        super().__init__()

    @endpoint
    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    @endpoint
    def hold_port(self) -> int:
        """See the function."""
        return hold_port()

    @endpoint
    def load(self, modules: Sequence[str]) -> None:
        """Imports modules."""
        with without_garbage_collection():
            for module in modules:
                import_module(module)


def hold_port() -> int:
    """A TCP port of this host, for torch's store, that the kernel gives to nobody else while this process lives.

    The socket is bound and does not listen, so that torch, which allows addresses to be reused, can bind to it too.
    """
    held = socket.socket(socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _held_ports.append(held)
    return int(held.getsockname()[1])


def command_of_rank(
    place: Place, log_files: tuple[Path, ...], env: Mapping[str, str]
) -> Callable[[object], BootstrapCommand]:
    """For Monarch: rank -> the command that starts its process, whose environment has `env` in it."""

    def command(point: Any) -> BootstrapCommand:
        own = {**place.env(point.rank, log_files), _LOG_FILE: str(place.log_file(point.rank, log_files))}
        return default_bootstrap_cmd().with_env({**env, **own, _MODULE_FOLDERS: json.dumps(module_folders())})

    return command


def module_folders() -> list[str]:
    """The folders in which this process finds modules of the user's, such as that of the script that it runs."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [Path(entry).absolute() for entry in sys.path]
    return [str(each) for each in folders if each.is_dir() and not any(map(each.is_relative_to, installed))]


async def prepare_ranks(processes: Any, address: str) -> None:
    """Gives processes the address and a port of rank 0, and ends their `RankProcess` actors, whose last work this is.

    Monarch would look at them again and again, and keep some memory each time.
    """
    of_rank_0, *_ = (await processes.hold_port.call()).values()
    await processes.setup_env.call(address, of_rank_0)
    await processes.stop("the process is ready")


def _prepare_process() -> None:
    """Sends this process's output, and the stacks that it is asked for, to its log; leaves signals to the controller.

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
    answer_stack_signal()
    # Behind all others: a user's module has no name of a package that this process needs.
    sys.path += [each for each in json.loads(os.environ[_MODULE_FOLDERS]) if each not in sys.path]
