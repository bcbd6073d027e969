"""Other hosts as the core knows them: what a plug-in such as `ownloop-hosts` has for them, and what `--hosts` says.

    --hosts trainer=n1:26600 generator=n2:26600    the class of the entry point `workers`, group `ownloop.hosts`
    --hosts ssh trainer=n1 generator=n2            that of the entry point `ssh`: the first word
    --hosts none                                   this host, in place of those of a recipe or a resumed run

A class makes `Hosts` of the words. A `Launcher` connects to them before it starts anything, and asks the `Cluster` that
it gets where each mesh runs. A cluster that leaves a mesh to the controller's host answers None.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from controller.processes.place import Place
from generator.config import GeneratorConfig
from rl.checks import did_you_mean
from rl.system.plugins import find, named_by, why_absent
from trainer.config import TrainerConfig

if TYPE_CHECKING:  # the import would load torch and Monarch
    from controller.handles.store import Receivers

Tell = Callable[[str], None]
"""Called with a short message during slow work."""

METAVAR = "ROLE=HOST:PORT,... | ssh ROLE=HOST,... | slurm ROLE=NODES ... | kubernetes ROLE=PODS ... image=IMAGE | none"
_NONE = "none"
_RUNNING = "workers"  # the kind of hosts that is meant where no word names one


class Cluster(Protocol):
    """Other hosts while they are in use. What they cannot do raises ValueError, and a lost host `HostLostError`."""

    @property
    def several(self) -> bool:
        """Whether weights have to get from the trainer's host to another one."""
        ...

    def has_gpu(self, name: str, *, is_trainer: bool) -> bool | None:
        """Whether the hosts of a mesh have GPUs."""
        ...

    def trainer(self, name: str, config: TrainerConfig) -> Place | None:
        """Where a trainer runs."""
        ...

    def generators(self, name: str, config: GeneratorConfig) -> Sequence[Place] | None:
        """Where the replicas of a generator run, and then its evaluator. Called for every generator."""
        ...

    async def replaced(self, place: Place, name: str, index: int, config: GeneratorConfig) -> Place:
        """Where a replica runs that is started again: at the same place, or if a host is lost, on hosts that are left.

        Raises `HostLostError` if no host is left.
        """
        ...

    def store(self) -> Place | None:
        """Where the volume of the weight store runs: beside the trainer, whose weights it holds."""
        ...

    def receivers(self, log_dir: Path, store_name: str) -> "Receivers":
        """What receives weights on the hosts of generators. It starts nothing yet."""
        ...

    async def stop(self) -> None:
        """Gives the hosts up, once everything on them has ended. Returns within seconds."""
        ...


@runtime_checkable
class Hosts(Protocol):
    """Where the roles of a run may be. Its class has `from_words(kind, words)`: what `--hosts` says after its kind."""

    async def connect(self) -> Cluster:
        """Connects to the hosts. Raises ValueError naming each host that cannot be used, and why."""
        ...

    def kept(self, tell: Tell) -> AbstractAsyncContextManager[None]:
        """Keeps what is allocated for these hosts, within a block, over launchers. `tell` gets what it waits for."""
        ...


run_hosts: "ContextVar[Hosts | None]" = ContextVar("run_hosts", default=None)
"""The field `hosts` of the configuration of the run that is under way."""


def check_no_hosts_expected() -> None:
    """Raises ValueError if the run that is under way has hosts, for a loop that does not use them."""
    if run_hosts.get() is not None:
        raise ValueError(
            "the run has hosts, and its loop would start all processes on this one; have the loop pass them on: "
            "launch(model, trainer, generator, log_dir, config.hosts), or Launcher(log_dir, config.hosts)"
        )


@asynccontextmanager
async def kept(hosts: Hosts | None, tell: Tell) -> AsyncGenerator[None]:
    """Keeps what is allocated for other hosts, if there are any, until the end of the block."""
    if hosts is None:
        yield
        return
    async with hosts.kept(tell):
        yield


def parse_hosts(words: Sequence[str]) -> Hosts | None:
    """The hosts that the words of `--hosts` name; None is this one.

    Raises ValueError as their class does, for no word, and for a kind that is not installed.
    """
    if list(words) == [_NONE]:
        return None
    kind, rest = (words[0], words[1:]) if words and "=" not in words[0] else (_RUNNING, words)
    found: type[Any] | None = find("hosts", kind, type)
    if found is not None:
        return found.from_words(kind, rest)
    if reason := why_absent("hosts", kind):
        raise ValueError(f"--hosts is {' '.join(words)!r}; {reason}")
    raise ValueError(
        f"--hosts {kind!r} is neither ROLE=HOST:PORT nor a way to start workers"
        f"{did_you_mean(kind, (*named_by('hosts'), _NONE))}"
    )
