"""`SlurmHosts`: nodes of a Slurm cluster, on which the run starts `ownloop worker` itself, and ends it.

    ownloop run grpo --hosts slurm trainer=4 generator=4 partition=gpu gpus_per_node=8 time=04:00:00
    hosts=SlurmHosts({"trainer": 4, "generator": 4}, partition="gpu", gpus_per_node=8, time="04:00:00")

On a login node it submits a job, waits for its nodes, and cancels it at the end. Inside an allocation (`salloc`,
`sbatch`) it uses the nodes that are there. If the job ends before the run, because of its time limit or a preemption,
its hosts are lost, and a run that restarts waits for a new job. When the controller is killed the workers end, because
they hold its lifeline, and the job with them.

Monarch's `SlurmJob` submits a job too. It is not used: its workers speak plain TCP on a fixed port, it needs
`squeue --json`, it waits without a word, and its job runs on when the controller is killed.
"""

import asyncio
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.launching.hosts import Tell
from ownloop_hosts.connections import DEFAULT_PORT, parse_address
from ownloop_hosts.host_groups import Allocation
from ownloop_hosts.starting.worker_starts import WithRunCertificates, output_of
from rl.checks import check_above_zero, check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmHosts(WithRunCertificates):
    """Nodes that have this Python and ownloop at the same paths, and share a filesystem with the controller."""

    groups: Mapping[str, int] = field(kw_only=False)
    """How many nodes each role has."""
    partition: str = ""
    """Empty for the cluster's default; so are `account` and `time`."""
    account: str = ""
    time: str = ""
    """The job's time limit, as Slurm writes it: "04:00:00"."""
    gpus_per_node: int = 0
    exclusive: bool = True
    """Whole nodes, with all of their memory. False: `options` says what is needed."""
    options: Sequence[str] = ()
    """Further options of sbatch, such as ("--qos=high", "--constraint=h100")."""
    folder: str = ""
    """A folder that the nodes and the controller share, for certificates and output; empty for ownloop's cache."""
    port: int = DEFAULT_PORT
    """The first of the ten ports of each worker."""
    python: str = ""
    """The interpreter of the workers; empty for the controller's. What they start has the controller's in any case."""
    tls: bool = True
    """False leaves TLS out: any process that reaches a worker's port can then run any program as your user."""
    start_within_s: float = 120.0
    """Seconds that the workers have to start, once the job runs. It waits in the queue for any time."""
    lost_after_s: float = 20.0
    """Seconds of silence after which a host is lost, and a worker ends whose controller is silent."""

    def __post_init__(self) -> None:
        """Raises ValueError for a role without nodes, and for options that cannot be."""
        check_above_zero(lost_after_s=self.lost_after_s, start_within_s=self.start_within_s)
        check_at_least(0, gpus_per_node=self.gpus_per_node)
        for role, count in self.groups.items():
            if count < 1:
                raise ValueError(f"{role!r} has {count} nodes; give it at least 1, or leave it out")
        for option in self.options:
            if not option.startswith("--") or "\n" in option:  # a line break would begin another line of the script
                raise ValueError(f"an option of sbatch is {option!r}; write it in one word: --NAME=VALUE")
        parse_address(f"n1:{self.port}")

    @property
    def num_nodes(self) -> int:
        """The nodes of all roles together."""
        return sum(self.groups.values())

    def job_options(self) -> list[str]:
        """The options of sbatch."""
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        return [
            *(f"--{name}={value}" for name, value in named.items() if value),
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *(["--exclusive", "--mem=0"] if self.exclusive else []),  # all cores and all memory of a node
            *self.options,
        ]

    def allocation(self, tell: Tell) -> Allocation:
        """The nodes of the allocation in which this process runs, or of a job; nothing is submitted yet."""
        from ownloop_hosts.starting.slurm_workers import NewJob, OwnAllocation

        job = os.environ.get("SLURM_JOB_ID")  # set by Slurm within an allocation
        return NewJob(self, tell) if job is None else OwnAllocation(self, tell, job)


_CANCEL_S = 3.0
_TRIES = 4  # squeue fails now and then on a busy cluster
_STARTING = ("PENDING", "CONFIGURING")
READY, LIFELINE, OUTPUT, CERTIFICATES, SCRIPT = "ready", "lifeline", "output.txt", "certs", "worker.sh"
"""Files of a job's folder, which every node sees. `READY` is written last."""
_MOST_TRIES = 240  # of half a second


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds between two looks."""

    job: float = 2.0
    """At the state of the job."""
    busy: float = 5.0
    """The same, after squeue has failed."""
    output: float = 0.5
    """At what the workers print."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What squeue says of a job."""

    state: str
    """"PENDING", "RUNNING" and so on; empty if the job has left the queue."""
    reason: str
    nodes: str
    """The nodes as Slurm abbreviates them: "n[1-4]"."""

    @property
    def runs(self) -> bool:
        """Whether it has its nodes."""
        return self.state == "RUNNING"

    @property
    def waits(self) -> bool:
        """Whether it may have them later."""
        return self.state in _STARTING

    def __str__(self) -> str:
        """The job as users read it."""
        reason = "" if self.reason in ("", "None") else f" ({self.reason})"
        return f"{self.state}{reason}" if self.state else "not in the queue any more"


async def submit(script: str) -> str:
    """The id of a new job. Raises ValueError with what sbatch says against it."""
    # "ID;CLUSTER" where there are several clusters
    return (await output_of(["sbatch", "--parsable"], script)).strip().partition(";")[0]


async def state_of(job: str, pause_s: float) -> JobState:
    """The state of a job now. Raises ValueError if squeue does not answer several times, with pauses between them."""
    for left in reversed(range(_TRIES)):
        try:
            # %r may contain anything but the separator
            printed = await output_of(["squeue", "--noheader", "--jobs", job, "--format", "%T|%r|%N"])
        except ValueError as error:
            if "Invalid job id" in str(error):  # it has ended and was forgotten
                return JobState("", "", "")
            if not left:
                raise
            await asyncio.sleep(pause_s)  # a busy controller of Slurm times out now and then
        else:
            state, _, rest = printed.strip().partition("|")
            reason, _, nodes = rest.rpartition("|")  # the reason may have the separator in it
            return JobState(state, reason, nodes)
    raise AssertionError


async def nodes_of(abbreviated: str) -> tuple[str, ...]:
    """The names of nodes that Slurm abbreviates."""
    return tuple((await output_of(["scontrol", "show", "hostnames", abbreviated])).split())


async def cancel(job: str) -> None:
    """Ends a job, or gives up after seconds: its workers end with the run in any case."""
    with contextlib.suppress(ValueError, asyncio.CancelledError):  # also when the run itself is cancelled
        await output_of(["scancel", job], within_s=_CANCEL_S)


def batch_script(folder: Path, num_nodes: int, options: Sequence[str]) -> str:
    """The script of a job that runs the worker's script once on each node, until the workers end."""
    own = [
        "--job-name=ownloop",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--output={folder / OUTPUT}",  # both streams of all nodes, for the controller to follow
        "--no-requeue",  # the workers of a job that began again would wait for another controller
        "--no-kill",  # the run continues without a node that fails
    ]
    lines = [f"#SBATCH {option}" for option in (*own, *options)]
    step = shlex.join(step_command(folder, num_nodes))
    return "\n".join(["#!/bin/bash", *lines, f"exec {step}", ""])  # exec: signals of Slurm reach srun


def step_command(folder: Path, num_nodes: int, options: Sequence[str] = ()) -> list[str]:
    """The `srun` that does so."""
    return [
        *("srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--unbuffered"),
        "--cpu-bind=none",  # one task a node would otherwise be bound to one core
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),  # a worker that ends takes no other with it
        *options,
        *("sh", str(folder / SCRIPT)),
    ]


def worker_script(folder: Path, worker: str) -> str:
    """What runs on each node: waits for the files that the controller writes once it knows the nodes."""
    ready, shared = shlex.quote(str(folder / READY)), shlex.quote(str(folder))
    return f"""tries=0
until [ -e {ready} ]; do
  tries=$((tries + 1))
  if [ $tries -gt {_MOST_TRIES} ]; then echo "$SLURMD_NODENAME: the controller has gone, or {folder} is not shared"
    exit 1
  fi
  sleep 0.5
  ls {shared} > /dev/null  # a network filesystem looks again
done
{worker}
echo "worker on $SLURMD_NODENAME ended with status $?"
"""
