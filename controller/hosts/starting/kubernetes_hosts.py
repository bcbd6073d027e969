"""`KubernetesHosts`: pods of a Kubernetes cluster, which the run makes with the user's own `kubectl`, and deletes.

    ownloop run grpo --hosts kubernetes trainer=2 generator=1 image=registry/ownloop:1 gpus_per_pod=8
    hosts=KubernetesHosts({"trainer": 2, "generator": 1}, image="registry/ownloop:1", gpus_per_pod=8)

The controller runs where pods reach it and where it reaches them: in a pod of the cluster. `ownloop hosts kubernetes`
prints the manifests for workers that are to stay from run to run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.hosts.addresses import DEFAULT_PORT, parse_address
from controller.hosts.host_groups import Allocation, Tell
from controller.hosts.starting.run_certificates import WithRunCertificates
from rl.checks import check_above_zero, check_at_least

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesHosts(WithRunCertificates):
    """Pods whose image has the controller's Python and ownloop, at the same paths."""

    groups: Mapping[str, int] = field(kw_only=False)
    """How many pods each role has."""
    image: str
    name: str = "ownloop"
    """The beginning of all names. Runs beside each other in one namespace have different ones."""
    namespace: str = "default"
    gpus_per_pod: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    cpus: str = ""
    """The request of a pod, as Kubernetes writes it: "16"."""
    memory: str = ""
    """The same: "200Gi"."""
    claims: Sequence[str] = ()
    """Persistent volume claims to mount, `NAME:/PATH`: the runs' folder, for one."""
    python: str = ""
    """The interpreter of the workers; empty for the controller's. What they start has the controller's in any case."""
    directory: str = ""
    """The working directory of all processes there; empty for the image's."""
    kubectl: Sequence[str] = ("kubectl",)
    """The program and its own options, such as ("kubectl", "--context", "lab")."""
    port: int = DEFAULT_PORT
    """The first of the ten ports of each worker."""
    tls: bool = True
    """False leaves TLS out: whoever reaches a pod can then run any program in it."""
    start_within_s: float = 600.0
    """Seconds that the workers have to start, once all pods have a node: for pulling the image."""
    lost_after_s: float = 20.0
    """Seconds of silence after which a host is lost, and a worker ends whose controller is silent."""

    def __post_init__(self) -> None:
        """Raises ValueError for a role without pods, and for names that Kubernetes would refuse."""
        check_above_zero(lost_after_s=self.lost_after_s, start_within_s=self.start_within_s)
        check_at_least(0, gpus_per_pod=self.gpus_per_pod)
        for what, name in (("name", self.name), ("namespace", self.namespace), *(("a role", r) for r in self.groups)):
            if not _LABEL.fullmatch(name):
                raise ValueError(f"{what} is {name!r}; use at most 30 small letters, digits and hyphens")
        for role, count in self.groups.items():
            if count < 1:
                raise ValueError(f"{role!r} has {count} pods; give it at least 1, or leave it out")
        for claim in self.claims:
            if not re.fullmatch(r"[a-z0-9.-]+:/\S+", claim):
                raise ValueError(f"a claim is {claim!r}; write NAME:/PATH")
        if not self.image or not self.kubectl:
            raise ValueError("image or kubectl is empty; name the image that has ownloop, and the program")
        parse_address(f"n1:{self.port}")

    @property
    def addresses(self) -> Mapping[str, tuple[str, ...]]:
        """The names of each role's pods, as all pods of the cluster know them."""
        return {role: tuple(self.address(role, index) for index in range(count)) for role, count in self.groups.items()}

    def job(self, role: str) -> str:
        """The name of a role's Job."""
        return f"{self.name}-{role}"

    def address(self, role: str, index: int | str) -> str:
        """The name of one pod."""
        return f"{self.job(role)}-{index}.{self.name}.{self.namespace}.svc"

    def allocation(self, tell: Tell) -> Allocation:
        """Makes nothing yet."""
        from controller.hosts.starting.kubernetes_pods import Pods

        return Pods(self, tell)
