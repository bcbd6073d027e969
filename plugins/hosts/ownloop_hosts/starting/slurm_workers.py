"""The workers of one run on nodes of Slurm: in a job that is submitted for them, or in the allocation of this process.

The controller and the nodes share a folder. The nodes are known only when the job runs, so each worker waits there for
its certificate and for the address of the lifeline.
"""

import asyncio
import os
import shlex
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path

from controller.launching.hosts import Tell
from controller.processes.errors import HostsOverError
from ownloop_hosts.connections import Address, Lifeline, host_and_port, own_address_towards
from ownloop_hosts.host_groups import Groups
from ownloop_hosts.starting.slurm_hosts import (
    CERTIFICATES,
    LIFELINE,
    OUTPUT,
    READY,
    SCRIPT,
    JobState,
    SlurmHosts,
    Times,
    batch_script,
    cancel,
    nodes_of,
    state_of,
    step_command,
    submit,
    worker_script,
)
from ownloop_hosts.starting.worker_starts import (
    WorkerOutput,
    end_process,
    environment,
    until_it_accepts,
    worker_certificates,
    worker_command,
)
from rl.system.disk import cache_directory

_END_S = 3.0


class SlurmWorkers(ABC):
    """What both ways share: the folder, the lifeline, the workers' output."""

    def __init__(self, hosts: SlurmHosts, tell: Tell, times: Times) -> None:
        """Starts nothing."""
        self._hosts = hosts
        self._tell = tell
        self._times = times
        # a folder that all nodes see at the same path
        shared = Path(hosts.folder).expanduser().absolute() if hosts.folder else cache_directory() / "slurm"
        self._folder = shared / uuid.uuid4().hex  # of this run alone
        self._output = WorkerOutput("slurm")
        self._lifeline: Lifeline | None = None
        self._reader: asyncio.Task[None] | None = None
        self._groups: Groups | None = None
        self._over: str | None = None  # why it ended, once it has

    async def workers(self) -> Groups:
        """See `Allocation.workers`. What has ended as a whole begins again; a node alone does not come back."""
        if self._groups is not None:
            self._over = await self._why_over()
            if self._over is None:
                return self._groups
            self._tell(f"{self._over}; starting again")
            await self.stop()  # a new job has new nodes and a new lifeline
        try:
            self._groups = await self._start()
        except BaseException:
            await self.stop()
            raise
        return self._groups

    async def revived(self) -> Groups:
        """See `Allocation.revived`."""
        assert self._groups is not None
        if (over := await self._why_over()) is not None:  # a lost node alone is the caller's business
            raise HostsOverError("hosts", over)
        return self._groups

    async def stop(self) -> None:
        """See `Allocation.stop`."""
        if self._lifeline is not None:
            self._lifeline.cut()
        await self._end()  # the workers end with the lifeline; this is for what runs them
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._groups = self._lifeline = self._reader = self._over = None  # the next start begins from nothing
        shutil.rmtree(self._folder, ignore_errors=True)

    @abstractmethod
    async def _nodes(self) -> tuple[str, ...]:
        """The nodes, once they are there."""

    @abstractmethod
    async def _launch(self, nodes: tuple[str, ...]) -> None:
        """Has the nodes run the worker's script, if they do not yet."""

    @abstractmethod
    async def _why_over(self) -> str | None:
        """Why no worker can run any more; None while they can."""

    @abstractmethod
    async def _end(self) -> None:
        """Ends what runs the workers, which end by themselves."""

    async def _start(self) -> Groups:
        hosts = self._hosts
        self._output = WorkerOutput("slurm")
        self._write_script()  # before the job: it runs the script as soon as it begins
        nodes = await self._nodes()
        if len(nodes) < hosts.num_nodes:
            raise ValueError(f"{self._name} has the nodes {', '.join(nodes)}; {hosts.num_nodes} are needed")
        nodes = nodes[: hosts.num_nodes]  # an allocation may have more
        self._write_answers(nodes)
        await self._launch(nodes)
        self._reader = asyncio.create_task(self._read())
        watch = asyncio.create_task(self._watch())  # the job may end meanwhile
        try:
            end = time.monotonic() + hosts.start_within_s
            # all problems are shown, not the first alone
            found = await asyncio.gather(*(self._listening(node, end) for node in nodes), return_exceptions=True)
        finally:
            watch.cancel()
        addresses: list[Address] = []
        for each in found:
            if isinstance(each, BaseException):
                problems = "\n".join(str(error) for error in found if isinstance(error, BaseException))
                raise ValueError(f"{problems}\nThe last lines of the workers:\n{self._output.end}") from each
            addresses.append(each)
        rest = iter(addresses)
        # roles take their nodes in order
        return {role: tuple(next(rest) for _ in range(count)) for role, count in hosts.groups.items()}

    @property
    @abstractmethod
    def _name(self) -> str:
        """What errors call it."""

    def _write_script(self) -> None:
        self._folder.mkdir(parents=True, mode=0o700)  # others cannot read the keys in it
        hosts, folder = self._hosts, self._folder
        # the shell of the node knows it
        address = Address("tls" if hosts.tls else "tcp", '"$SLURMD_NODENAME"', hosts.port)
        command = worker_command(
            address,
            f'"$(cat {shlex.quote(str(folder / LIFELINE))})"',
            hosts.lost_after_s,
            python=hosts.python,
            certs=shlex.quote(str(folder / CERTIFICATES)),
        )
        script = worker_script(folder, " ".join(["env", *environment(), *command]))
        (folder / SCRIPT).write_text(script)
        (folder / OUTPUT).touch()

    def _write_answers(self, nodes: tuple[str, ...]) -> None:
        """What the worker's script waits for."""
        folder, here = self._folder, own_address_towards(nodes[0])
        self._lifeline = Lifeline(here, for_many=True)
        (folder / LIFELINE).write_text(host_and_port(*self._lifeline.end))
        if self._hosts.tls:
            for node in nodes:
                shutil.copytree(worker_certificates(node), folder / CERTIFICATES / node)
        (folder / READY).touch()  # last: a node reads the others as soon as it sees this one

    async def _listening(self, node: str, end: float) -> Address:
        def why_not() -> str | None:
            status = self._output.ended.get(node)
            return self._over if status is None else f"its worker ended with status {status}"

        try:
            return await until_it_accepts(lambda: self._output.listening.get(node), end, why_not)
        except ValueError as error:
            raise ValueError(f"{node}: {error}") from None

    async def _watch(self) -> None:
        """Notices that a job ends while its workers start."""
        while self._over is None:
            await asyncio.sleep(self._times.job)
            self._over = await self._why_over()

    async def _read(self) -> None:
        """Follows the output of all workers."""
        with (self._folder / OUTPUT).open(errors="replace") as file:  # bytes that were cut in the middle are replaced
            part = ""
            while True:
                *lines, part = (part + file.read()).split("\n")  # the last part has no line end yet
                for line in lines:
                    self._output.take(line)
                await asyncio.sleep(self._times.output)


class NewJob(SlurmWorkers):
    """A job of its own."""

    def __init__(self, hosts: SlurmHosts, tell: Tell, times: Times = Times()) -> None:  # noqa: B008
        """Submits nothing yet."""
        super().__init__(hosts, tell, times)
        self._job: str | None = None

    @property
    def _name(self) -> str:
        return f"Slurm job {self._job}"

    async def _nodes(self) -> tuple[str, ...]:
        hosts = self._hosts
        self._job = await submit(batch_script(self._folder, hosts.num_nodes, hosts.job_options()))
        told = ""
        while not (state := await state_of(self._job, self._times.busy)).runs:  # the queue has no limit of time
            if not state.waits:
                # it failed, or was cancelled
                raise ValueError(f"{self._name} is {state}\n{(self._folder / OUTPUT).read_text()}".strip())
            if str(state) != told:  # told once, not at every look
                told = str(state)
                self._tell(f"{self._name} for {hosts.num_nodes} nodes is {told}")
            await asyncio.sleep(self._times.job)
        nodes = await nodes_of(state.nodes)
        self._tell(f"{self._name} has {state.nodes}; starting workers")
        return nodes

    async def _launch(self, nodes: tuple[str, ...]) -> None:
        pass  # the job does

    async def _why_over(self) -> str | None:
        assert self._job is not None
        state: JobState = await state_of(self._job, self._times.busy)
        return None if state.runs else f"{self._name} is {state}"

    async def _end(self) -> None:
        if self._job is not None:
            await cancel(self._job)
            self._job = None


class OwnAllocation(SlurmWorkers):
    """The allocation that this process runs in."""

    def __init__(self, hosts: SlurmHosts, tell: Tell, job: str, times: Times = Times()) -> None:  # noqa: B008
        """Starts nothing yet."""
        super().__init__(hosts, tell, times)
        self._job = job
        self._step: asyncio.subprocess.Process | None = None

    @property
    def _name(self) -> str:
        return f"the allocation {self._job}"

    async def _nodes(self) -> tuple[str, ...]:
        return await nodes_of(os.environ["SLURM_JOB_NODELIST"])  # Slurm's own variable

    async def _launch(self, nodes: tuple[str, ...]) -> None:
        self._tell(f"starting workers on {', '.join(nodes)}")
        # The controller may be a step itself, whose cores the workers are to share.
        options = [f"--jobid={self._job}", f"--nodelist={','.join(nodes)}", "--overlap"]
        with (self._folder / OUTPUT).open("ab") as output:
            self._step = await asyncio.create_subprocess_exec(
                *step_command(self._folder, len(nodes), options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the controller alone, which ends everything in order
            )

    async def _why_over(self) -> str | None:
        if self._step is None or self._step.returncode is None:
            return None
        return f"srun in {self._name} ended with status {self._step.returncode}"

    async def _end(self) -> None:
        if self._step is not None:
            await end_process(self._step, _END_S)  # its lifeline is cut
        self._step = None
