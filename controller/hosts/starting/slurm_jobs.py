"""One job of Slurm: its script, its state, its nodes. Uses sbatch, squeue, scontrol and scancel."""

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.hosts.starting.programs import output_of

_CANCEL_S = 3.0
_TRIES = 4
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
    """As Slurm abbreviates them: "n[1-4]"."""

    @property
    def runs(self) -> bool:
        """Whether it has its nodes."""
        return self.state == "RUNNING"

    @property
    def waits(self) -> bool:
        """Whether it may have them later."""
        return self.state in _STARTING

    def __str__(self) -> str:
        """For users."""
        reason = "" if self.reason in ("", "None") else f" ({self.reason})"
        return f"{self.state}{reason}" if self.state else "not in the queue any more"


async def submit(script: str) -> str:
    """The id of a new job. Raises ValueError with what sbatch says against it."""
    return (await output_of(["sbatch", "--parsable"], script)).strip().partition(";")[0]


async def state_of(job: str, pause_s: float) -> JobState:
    """The state of a job now. Raises ValueError if squeue does not answer several times, with pauses between them."""
    for left in reversed(range(_TRIES)):
        try:
            printed = await output_of(["squeue", "--noheader", "--jobs", job, "--format", "%T|%r|%N"])
        except ValueError as error:
            if "Invalid job id" in str(error):
                return JobState("", "", "")
            if not left:
                raise
            await asyncio.sleep(pause_s)  # a busy controller of Slurm times out now and then
        else:
            state, _, rest = printed.strip().partition("|")
            reason, _, nodes = rest.rpartition("|")
            return JobState(state, reason, nodes)
    raise AssertionError


async def nodes_of(abbreviated: str) -> tuple[str, ...]:
    """The names of nodes that Slurm abbreviates."""
    return tuple((await output_of(["scontrol", "show", "hostnames", abbreviated])).split())


async def cancel(job: str) -> None:
    """Ends a job, or gives up after seconds: its workers end with the run in any case."""
    with contextlib.suppress(ValueError, asyncio.CancelledError):
        await output_of(["scancel", job], within_s=_CANCEL_S)


def batch_script(folder: Path, num_nodes: int, options: Sequence[str]) -> str:
    """The script of a job that runs the worker's script once on each node, until the workers end."""
    own = [
        "--job-name=ownloop",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--output={folder / OUTPUT}",
        "--no-requeue",  # the workers of a job that began again would wait for another controller
        "--no-kill",  # the run goes on without a node that fails
    ]
    lines = [f"#SBATCH {option}" for option in (*own, *options)]
    step = shlex.join(step_command(folder, num_nodes))
    return "\n".join(["#!/bin/bash", *lines, f"exec {step}", ""])


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
