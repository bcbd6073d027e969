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

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.hosts.addresses import DEFAULT_PORT, parse_address
from controller.hosts.host_groups import Allocation, Tell
from controller.hosts.starting.run_certificates import WithRunCertificates
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
    """False leaves TLS out: whoever reaches a worker's port can then run any program as your user."""
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
            if not option.startswith("--") or "\n" in option:
                raise ValueError(f"an option of sbatch is {option!r}; write it in one word: --NAME=VALUE")
        parse_address(f"n1:{self.port}")

    @property
    def num_nodes(self) -> int:
        """Of all roles."""
        return sum(self.groups.values())

    def job_options(self) -> list[str]:
        """For sbatch."""
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        return [
            *(f"--{name}={value}" for name, value in named.items() if value),
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *(["--exclusive", "--mem=0"] if self.exclusive else []),
            *self.options,
        ]

    def allocation(self, tell: Tell) -> Allocation:
        """The nodes of the allocation in which this process runs, or of a job; nothing is submitted yet."""
        from controller.hosts.starting.slurm_workers import NewJob, OwnAllocation

        job = os.environ.get("SLURM_JOB_ID")
        return NewJob(self, tell) if job is None else OwnAllocation(self, tell, job)
