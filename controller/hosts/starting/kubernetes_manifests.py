"""The manifests of pods that are workers: for each role an indexed Job, and for all a Service and a Secret.

The pods of an indexed Job have names that are known before they run, which certificates are made for:
`<name>-<role>-<index>.<name>.<namespace>.svc`. Nothing but Kubernetes itself is needed in the cluster. Monarch's own
`KubernetesJob` needs its operator there, and its workers speak plain TCP.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.hosts.addresses import Address
from controller.hosts.starting.kubernetes_hosts import KubernetesHosts
from controller.hosts.starting.worker_starts import worker_command

_MOUNT = "/etc/ownloop/certs"
_FILES = ("ca.pem", "cert.pem", "key.pem")
LABEL = "ownloop/name"
"""All objects of some hosts have this label, whose value is their name."""
_KEPT_S = 600


def manifests(
    hosts: KubernetesHosts, certificates: Mapping[str, Path], lifeline: str | None = None
) -> list[dict[str, Any]]:
    """The objects of these hosts. `certificates` are the folders of the pods' certificates, by their addresses.

    With a lifeline, `HOST:PORT`, the pods end when the controller does that listens there.
    """
    service = _object(hosts, "v1", "Service", hosts.name)
    # A worker listens before its pod counts as ready, and is found by its name from then on.
    service["spec"] = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: hosts.name}}
    jobs = [_job(hosts, role, count, lifeline) for role, count in hosts.groups.items()]
    return [service, *([_secret(hosts, certificates)] if hosts.tls else []), *jobs]


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
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
        "completionMode": "Indexed",
        "backoffLimit": 3 * count,  # a pod that was evicted comes back under its name
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": {"labels": {LABEL: hosts.name}}, "spec": _pod(hosts, role, lifeline)},
    }
    return job


def _pod(hosts: KubernetesHosts, role: str, lifeline: str | None) -> dict[str, Any]:
    index = "$JOB_COMPLETION_INDEX"
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
        "command": ["sh", "-c", f"{known}; exec {' '.join(command)}"],
        "resources": {"requests": needs | gpus, "limits": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # weights and vLLM share memory between processes
    }
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if hosts.tls:
        container["volumeMounts"].append({"name": "certs", "mountPath": _MOUNT, "readOnly": True})
        volumes.append({"name": "certs", "secret": {"secretName": f"{hosts.name}-certs", "items": _items(hosts, role)}})
    for number, claim in enumerate(hosts.claims):
        name, _, path = claim.partition(":")
        container["volumeMounts"].append({"name": f"claim-{number}", "mountPath": path})
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}})
    if hosts.directory:
        container["workingDir"] = hosts.directory
    return {"subdomain": hosts.name, "restartPolicy": "Never", "containers": [container], "volumes": volumes}


def _items(hosts: KubernetesHosts, role: str) -> list[dict[str, Any]]:
    """The certificates of the role's pods, each in a folder with its pod's address."""
    addresses = [hosts.address(role, index) for index in range(hosts.groups[role])]
    return [
        {"key": f"{address}.{name}", "path": f"{address}/{name}", "mode": 0o400}
        for address in addresses
        for name in _FILES
    ]
