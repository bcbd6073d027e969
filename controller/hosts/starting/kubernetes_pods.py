"""The pods of one run: made, waited for and deleted with `kubectl`."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from controller.hosts.addresses import Address, own_address_towards, resolve
from controller.hosts.host_groups import Groups, Tell
from controller.hosts.lifeline import Lifeline
from controller.hosts.starting.kubernetes_hosts import KubernetesHosts
from controller.hosts.starting.kubernetes_manifests import LABEL, as_yaml, manifests
from controller.hosts.starting.programs import output_of
from controller.hosts.starting.run_certificates import worker_certificates
from controller.hosts.starting.worker_starts import until_it_accepts

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
        self._lifeline: Lifeline | None = None
        self._made = False
        self._groups: Groups | None = None
        self._failure: str | None = None

    async def workers(self) -> Groups:
        """See `Allocation.workers`. Kubernetes itself replaces pods that are lost, under their names."""
        if self._groups is None:
            try:
                self._groups = await self._start()
            except BaseException:
                await self.stop()
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
        if others := (await self._kubectl("get", "jobs", "--selector", self._selector, "--output", "name")).split():
            raise ValueError(
                f"{hosts.namespace} has {', '.join(others)} already; give these hosts another name, or delete them "
                f"with `kubectl delete {_KINDS} --namespace {hosts.namespace} --selector {self._selector}`"
            )
        here = own_address_towards(os.environ.get("KUBERNETES_SERVICE_HOST", _OTHER_NETWORK))
        self._lifeline = Lifeline(here, for_many=True)
        _, port = self._lifeline.end
        names = [name for role in hosts.addresses.values() for name in role]
        certificates = {name: worker_certificates(name) for name in names} if hosts.tls else {}
        objects = manifests(hosts, certificates, f"[{here}]:{port}" if ":" in here else f"{here}:{port}")
        self._made = True
        await self._kubectl("apply", "--filename", "-", text=as_yaml(objects))
        await self._until_pods_run(len(names))
        end = time.monotonic() + hosts.start_within_s
        scheme = "tls" if hosts.tls else "tcp"
        found: dict[str, Address] = {}
        watch = asyncio.create_task(self._watch())
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
        """Waits for any time for nodes, and `start_within_s` for the rest. Raises ValueError if a pod fails."""
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
            has_nodes = len(pods) >= count and all(pod["spec"].get("nodeName") for pod in pods)
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
            if pod["status"].get("phase") in ("Failed", "Succeeded"):
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
    for container in status.get("containerStatuses", ()):
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
