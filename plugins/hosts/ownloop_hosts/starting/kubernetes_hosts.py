"""`KubernetesHosts`: pods of a Kubernetes cluster, which the run makes with the user's own `kubectl`, and deletes.

    ownloop run grpo --hosts kubernetes trainer=2 generator=1 image=registry/ownloop:1 gpus_per_pod=8
    hosts=KubernetesHosts({"trainer": 2, "generator": 1}, image="registry/ownloop:1", gpus_per_pod=8)

The controller runs where pods reach it and where it reaches them: in a pod of the cluster. `ownloop hosts kubernetes`
prints the manifests for workers that are to stay from run to run: for each role an indexed Job, and for all a Service
and a Secret. The pods of an indexed Job have names that are known before they run, and certificates are made for these
names: `<name>-<role>-<index>.<name>.<namespace>.svc`. Nothing but Kubernetes itself is needed in the cluster. Monarch's
own `KubernetesJob` needs its operator there, and its workers speak plain TCP.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from controller.launching.hosts import Tell
from ownloop_hosts.connections import (
    DEFAULT_PORT,
    Address,
    Lifeline,
    host_and_port,
    own_address_towards,
    parse_address,
    resolve,
)
from ownloop_hosts.host_groups import Allocation, Groups
from ownloop_hosts.starting.worker_starts import (
    WithRunCertificates,
    output_of,
    until_it_accepts,
    worker_certificates,
    worker_command,
)
from rl.checks import check_above_zero, check_at_least

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")  # also a DNS label, with room for a role and a number


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
    """False leaves TLS out: any process that reaches a pod can then run any program in it."""
    start_within_s: float = 600.0
    """Seconds that the workers have to start, once all pods have a node: for pulling the image."""
    lost_after_s: float = 20.0
    """Seconds of silence after which a host is lost, and a worker ends whose controller is silent."""

    def __post_init__(self) -> None:
        """Raises ValueError for a role without pods, and for names that Kubernetes would refuse."""
        check_above_zero(lost_after_s=self.lost_after_s, start_within_s=self.start_within_s)
        check_at_least(0, gpus_per_pod=self.gpus_per_pod)
        # they become parts of DNS names
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
        parse_address(f"n1:{self.port}")  # a wrong port is an error now and not on the pods

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

        return Pods(self, tell)


_MOUNT = "/etc/ownloop/certs"
_FILES = ("ca.pem", "cert.pem", "key.pem")  # as `ownloop certs` names them
LABEL = "ownloop/name"
"""All objects of some hosts have this label, whose value is their name."""
_KEPT_S = 600  # seconds: long enough to read the logs of a pod


def manifests(
    hosts: KubernetesHosts, certificates: Mapping[str, Path], lifeline: str | None = None
) -> list[dict[str, Any]]:
    """The objects of these hosts. `certificates` are the folders of the pods' certificates, by their addresses.

    With a lifeline, `HOST:PORT`, the pods end when the controller does that listens there.
    """
    service = _object(hosts, "v1", "Service", hosts.name)
    # A worker listens before its pod counts as ready, and is found by its name from then on.
    # headless: each pod has a name of its own
    service["spec"] = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: hosts.name}}
    # one Job per role, whose pods keep their indices
    jobs = [_job(hosts, role, count, lifeline) for role, count in hosts.groups.items()]
    return [service, *([_secret(hosts, certificates)] if hosts.tls else []), *jobs]


def as_yaml(objects: Sequence[Mapping[str, object]]) -> str:
    """The objects as `kubectl apply -f` reads them."""
    import yaml

    return yaml.safe_dump_all(objects, sort_keys=False)


def _object(hosts: KubernetesHosts, version: str, kind: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": hosts.namespace, "labels": {LABEL: hosts.name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _secret(hosts: KubernetesHosts, certificates: Mapping[str, Path]) -> dict[str, Any]:
    secret = _object(hosts, "v1", "Secret", f"{hosts.name}-certs")
    secret["stringData"] = {
        f"{address}.{name}": (folder / name).read_text() for address, folder in certificates.items() for name in _FILES
    }
    return secret


def _job(hosts: KubernetesHosts, role: str, count: int, lifeline: str | None) -> dict[str, Any]:
    job = _object(hosts, "batch/v1", "Job", hosts.job(role))
    job["spec"] = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",  # each index runs once at a time, under the same name
        "backoffLimit": 3 * count,  # a pod that was evicted comes back under its name
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": {"labels": {LABEL: hosts.name}}, "spec": _pod(hosts, role, lifeline)},
    }
    return job


def _pod(hosts: KubernetesHosts, role: str, lifeline: str | None) -> dict[str, Any]:
    index = "$JOB_COMPLETION_INDEX"  # the shell of the pod knows it
    own = Address("tls" if hosts.tls else "tcp", hosts.address(role, index), hosts.port)
    end = None if lifeline is None else shlex.quote(lifeline)
    command = worker_command(own, end, hosts.lost_after_s, python=hosts.python, certs=_MOUNT)
    # The cluster's names know a new pod after a second or two, and a worker refuses a name without an address.
    known = f'for _ in $(seq 60); do getent hosts "{own.host}" > /dev/null && break; sleep 1; done'
    gpus = {hosts.gpu_resource: str(hosts.gpus_per_pod)} if hosts.gpus_per_pod else {}
    needs = {name: value for name, value in (("cpu", hosts.cpus), ("memory", hosts.memory)) if value}
    container: dict[str, Any] = {
        "name": "worker",
        "image": hosts.image,
        "command": ["sh", "-c", f"{known}; exec {' '.join(command)}"],  # exec: the worker gets the signals
        "resources": {"requests": needs | gpus, "limits": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # weights and vLLM share memory between processes
    }
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if hosts.tls:
        # read-only, and readable by the pod's user alone
        container["volumeMounts"].append({"name": "certs", "mountPath": _MOUNT, "readOnly": True})
        volumes.append({"name": "certs", "secret": {"secretName": f"{hosts.name}-certs", "items": _items(hosts, role)}})
    for number, claim in enumerate(hosts.claims):
        name, _, path = claim.partition(":")
        container["volumeMounts"].append({"name": f"claim-{number}", "mountPath": path})
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}})
    if hosts.directory:
        container["workingDir"] = hosts.directory
    # the Job makes a new pod; a container that restarts would be an old host
    return {"subdomain": hosts.name, "restartPolicy": "Never", "containers": [container], "volumes": volumes}


def _items(hosts: KubernetesHosts, role: str) -> list[dict[str, Any]]:
    """The certificates of the role's pods, each in a folder with its pod's address."""
    addresses = [hosts.address(role, index) for index in range(hosts.groups[role])]
    return [
        {"key": f"{address}.{name}", "path": f"{address}/{name}", "mode": 0o400}
        for address in addresses
        for name in _FILES
    ]


_DELETE_S = 3.0
_KINDS = "jobs,services,secrets"
_OTHER_NETWORK = "192.0.2.1"  # an address of no network (RFC 5737): what leads there is the default route


class Pods:
    """See `Allocation`."""

    def __init__(self, hosts: KubernetesHosts, tell: Tell, poll_s: float = 2.0) -> None:
        """Makes nothing. `poll_s` is the time between two looks at the pods."""
        self._hosts = hosts
        self._tell = tell
        self._poll_s = poll_s
        self._lifeline: Lifeline | None = None  # once cut, the pods end by themselves
        self._made = False
        self._groups: Groups | None = None
        self._failure: str | None = None

    async def workers(self) -> Groups:
        """See `Allocation.workers`. Kubernetes itself replaces pods that are lost, under their names."""
        if self._groups is None:
            try:
                self._groups = await self._start()
            except BaseException:
                await self.stop()  # what was made is removed before the error is shown
                raise
        return self._groups

    async def revived(self) -> Groups:
        """See `Allocation.revived`: Kubernetes does that."""
        assert self._groups is not None
        return self._groups

    async def stop(self) -> None:
        """See `Allocation.stop`."""
        if self._lifeline is not None:
            self._lifeline.cut()
        if self._made:
            with contextlib.suppress(ValueError):  # pods end with the lifeline, and their Jobs are removed later
                await self._kubectl("delete", _KINDS, "--selector", self._selector, "--wait=false", within_s=_DELETE_S)
        self._groups = self._lifeline = self._failure = None
        self._made = False

    async def _start(self) -> Groups:
        hosts = self._hosts
        # pods of another run would be taken for ours
        if others := (await self._kubectl("get", "jobs", "--selector", self._selector, "--output", "name")).split():
            raise ValueError(
                f"{hosts.namespace} has {', '.join(others)} already; give these hosts another name, or delete them "
                f"with `kubectl delete {_KINDS} --namespace {hosts.namespace} --selector {self._selector}`"
            )
        # in a pod the first is set
        here = own_address_towards(os.environ.get("KUBERNETES_SERVICE_HOST", _OTHER_NETWORK))
        self._lifeline = Lifeline(here, for_many=True)
        names = [name for role in hosts.addresses.values() for name in role]
        certificates = {name: worker_certificates(name) for name in names} if hosts.tls else {}
        objects = manifests(hosts, certificates, host_and_port(*self._lifeline.end))
        self._made = True  # before `apply`, which may make a part and fail
        await self._kubectl("apply", "--filename", "-", text=as_yaml(objects))  # all objects in one call
        await self._until_pods_run(len(names))
        end = time.monotonic() + hosts.start_within_s  # counted from now: pulling images is over
        scheme = "tls" if hosts.tls else "tcp"
        found: dict[str, Address] = {}
        watch = asyncio.create_task(self._watch())  # a pod may end while its worker starts
        try:
            for name in names:
                own = Address(scheme, name, hosts.port)
                found[name] = await until_it_accepts(lambda own=own: _resolved(own), end, lambda: self._failure)
        except ValueError as error:
            if self._failure is not None:
                raise
            raise ValueError(f"{names[len(found)]}: {error}. Is this process in a pod of the cluster?") from None
        finally:
            watch.cancel()
        return {role: tuple(found[name] for name in names) for role, names in hosts.addresses.items()}

    async def _until_pods_run(self, count: int) -> None:
        """Waits until all pods run: for nodes without limit, then `start_within_s`. Raises ValueError if one fails."""
        told, end = "", 0.0
        while True:
            pods = await self._pods()
            waiting = {pod["metadata"]["name"]: why for pod in pods if (why := _why_waiting(pod)) is not None}
            if (failure := await self._failure_of(pods)) is not None:
                raise ValueError(failure)
            if len(pods) >= count and not waiting:
                return
            words = (
                "; ".join(f"{name}: {why}" for name, why in sorted(waiting.items())) or f"{len(pods)} of {count} exist"
            )
            if words != told:
                self._tell(f"waiting for {count} pods: {words}")
                told = words
            # waiting in the queue of a cluster has no limit
            has_nodes = len(pods) >= count and all(pod["spec"].get("nodeName") for pod in pods)
            # from the first moment at which all have nodes
            end = end or (time.monotonic() + self._hosts.start_within_s if has_nodes else 0.0)
            if end and time.monotonic() > end:
                raise ValueError(f"pods have not started within {self._hosts.start_within_s:g} s: {words}")
            await asyncio.sleep(self._poll_s)

    async def _watch(self) -> None:
        """Notices that a pod ends while its worker starts."""
        while self._failure is None:
            await asyncio.sleep(self._poll_s)
            self._failure = await self._failure_of(await self._pods())

    async def _pods(self) -> list[dict[str, Any]]:
        return json.loads(await self._kubectl("get", "pods", "--selector", self._selector, "--output", "json"))["items"]

    async def _failure_of(self, pods: Sequence[Mapping[str, Any]]) -> str | None:
        """What the first pod that has ended said last; None if none has."""
        for pod in pods:
            name = pod["metadata"]["name"]
            if pod["status"].get("phase") in ("Failed", "Succeeded"):  # a worker ends only with the run
                try:
                    lines = (await self._kubectl("logs", name, "--tail=8")).strip()
                except ValueError as error:
                    lines = str(error)
                return f"the pod {name} has ended. The last lines of its worker:\n{lines}"
        return None

    async def _kubectl(self, *arguments: str, text: str = "", within_s: float = 60.0) -> str:
        command = [*self._hosts.kubectl, "--namespace", self._hosts.namespace, *arguments]
        return await output_of(command, text, within_s)

    @property
    def _selector(self) -> str:
        return f"{LABEL}={self._hosts.name}"


def _why_waiting(pod: Mapping[str, Any]) -> str | None:
    """Why a pod does not run yet; None if it does."""
    status = pod["status"]
    if status.get("phase") == "Running":
        return None
    for container in status.get("containerStatuses", ()):  # a container says more than its pod
        if (waiting := container.get("state", {}).get("waiting")) is not None:
            return f"{waiting.get('reason', 'waiting')} {waiting.get('message', '')}".strip()
    for condition in status.get("conditions", ()):
        if condition["status"] == "False" and condition.get("message"):
            return f"{condition.get('reason', '')} {condition['message']}".strip()
    return str(status.get("phase", "Pending"))


def _resolved(address: Address) -> Address | None:
    """The address once its name is known."""
    try:
        resolve(address.host)
    except ValueError:
        return None
    return address


@dataclass(frozen=True, kw_only=True)
class HostManifests:
    """Prints the Kubernetes manifests of workers."""

    cluster: Annotated[Literal["kubernetes"], Positional]
    """What the manifests are for."""
    words: Annotated[tuple[str, ...], Positional, arg(metavar="NAME=VALUE ...")]
    """Roles and options, as after `--hosts kubernetes` of `ownloop run`."""
    certs: Path = Path("certs")
    """The folder of `ownloop certs`; new certificates are made there."""

    def run(self) -> int:
        """Prints them on standard output, and what to do next on standard error."""
        from ownloop_hosts.certificates import CERTIFICATE, make_certificates

        hosts = KubernetesHosts.from_words(self.cluster, self.words)
        names = [name for role in hosts.addresses.values() for name in role]
        if hosts.tls:
            # certificates that exist are kept: their keys are in use
            make_certificates(self.certs, [name for name in names if not (self.certs / name / CERTIFICATE).exists()])
        print(as_yaml(manifests(hosts, {name: self.certs / name for name in names})), end="")
        scheme = "" if hosts.tls else "tcp://"
        roles = [
            f"{role}={','.join(f'{scheme}{name}:{hosts.port}' for name in names)}"
            for role, names in hosts.addresses.items()
        ]
        if hosts.tls:
            print("keep this to yourself: it holds the private keys of all pods", file=sys.stderr)
        print(f"then: ownloop run RECIPE --hosts {' '.join(roles)}", file=sys.stderr)
        return 0
