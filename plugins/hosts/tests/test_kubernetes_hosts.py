"""Pods that a run makes with kubectl: their manifests, what is said while they start, and how they end."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.commands.cli import main
from ownloop_hosts.certificates import own_certificates
from ownloop_hosts.connections import Address, accepts
from ownloop_hosts.starting import kubernetes_hosts
from ownloop_hosts.starting.kubernetes_hosts import KubernetesHosts, Pods, as_yaml, manifests
from ownloop_hosts.starting.worker_starts import worker_certificates
from plugins.hosts.tests.stand_ins import free_ports, install
from tests.waiting import LIMIT_S, wait_for_end

KUBECTL = """
shift 2
case "$*" in
  "get jobs"*) cat "$STAND_INS/jobs";;
  "get pods"*) cat "$STAND_INS/pods"; [ -e "$STAND_INS/next" ] && mv "$STAND_INS/next" "$STAND_INS/pods"; true;;
  "apply"*) cat > "$STAND_INS/applied";;
  "delete"*) echo "$*" > "$STAND_INS/deleted";;
  "logs"*) echo "error: host 'x' has no address";;
esac
"""
POLL_S = 0.02
WAITING = {"reason": "ImagePullBackOff", "message": "no such image"}


def pods(*pods: dict[str, Any]) -> str:
    """What kubectl answers."""
    return json.dumps({"items": list(pods)})


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    """One of them."""
    return {"metadata": {"name": name}, "spec": {"nodeName": "n1"}, "status": {"phase": phase, **status}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a kubectl of a cluster that has no jobs. Its pods are this machine."""
    install(tmp_path, monkeypatch, kubectl=KUBECTL)
    (tmp_path / "jobs").touch()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setattr(KubernetesHosts, "address", lambda *_: "127.0.0.1")
    monkeypatch.setattr(kubernetes_hosts, "_DELETE_S", LIMIT_S)
    return tmp_path


def folders(hosts: KubernetesHosts) -> dict[str, Path]:
    """The certificates of all pods."""
    return {name: worker_certificates(name) for names in hosts.addresses.values() for name in names}


def test_each_pod_finds_its_certificate_under_its_name(tmp_path: Path) -> None:
    hosts = KubernetesHosts({"trainer": 2}, image="lab/ownloop", namespace="rl", gpus_per_pod=8, claims=("runs:/runs",))
    objects = list(yaml.safe_load_all(as_yaml(manifests(hosts, folders(hosts), "10.0.0.1:4000"))))
    service, secret, job = objects
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"name": "claim-0", "mountPath": "/runs"} in container["volumeMounts"]
    certs = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "certs")
    assert certs["secretName"] == secret["metadata"]["name"]
    for item in certs["items"]:  # as Kubernetes mounts them
        (tmp_path / item["path"]).parent.mkdir(exist_ok=True)
        (tmp_path / item["path"]).write_text(secret["stringData"][item["key"]])
    words = container["command"][2].rpartition("exec ")[2]
    for index in range(2):
        env = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        echo = f'for each in {words}; do echo "$each"; done'
        arguments = subprocess.run(
            ["sh", "-c", echo], env=env, capture_output=True, text=True, check=True
        ).stdout.split()
        listen = arguments[arguments.index("--listen") + 1]
        assert listen == f"ownloop-trainer-{index}.ownloop.rl.svc:26600"
        own_certificates(tmp_path, listen.partition(":")[0])
        assert arguments[arguments.index("--lifeline") + 1] == "10.0.0.1:4000"


def test_manifests_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the published schemas")
    for tls in (True, False):
        hosts = KubernetesHosts(
            {"trainer": 2, "generator": 1},
            image="x",
            cpus="16",
            memory="200Gi",
            claims=("a:/a",),
            directory="/a",
            tls=tls,
        )
        for each in yaml.safe_load_all(as_yaml(manifests(hosts, folders(hosts)))):
            for version in ("1.29", "1.33"):
                validate.validate(each, version, strict=True)


def test_pods_are_waited_for_and_deleted(cluster: Path) -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    waiting = pod("ownloop-trainer-0", "Pending", conditions=[unschedulable])
    (cluster / "pods").write_text(pods(waiting))
    (cluster / "next").write_text(pods(pod("ownloop-trainer-0", "Running")))
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def run() -> None:
            allocation = Pods(KubernetesHosts({"trainer": 1}, image="x", port=port), told.append, POLL_S)
            try:
                expected = {"trainer": (Address("tls", "127.0.0.1", port),)}
                assert await allocation.workers() == await allocation.workers() == expected
            finally:
                await allocation.stop()

        asyncio.run(run())
    assert told == ["waiting for 1 pods: ownloop-trainer-0: Unschedulable 0/4 nodes"]
    assert len(list(yaml.safe_load_all((cluster / "applied").read_text()))) == 3
    assert "delete jobs,services,secrets --selector ownloop/name=ownloop" in (cluster / "deleted").read_text()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            pods(pod("t-0", "Failed")),
            "the pod t-0 has ended. The last lines of its worker:\nerror: host 'x' has no add",
        ),
        (
            pods(pod("t-0", "Pending", containerStatuses=[{"state": {"waiting": WAITING}}])),
            "pods have not started within 0.1 s: t-0: ImagePullBackOff no such image",
        ),
        (
            pods(pod("t-0", "Running")),
            "127.0.0.1: (no worker has begun to listen|its worker .* cannot be reached there)",
        ),
    ],
)
def test_pods_that_do_not_start_are_named_and_deleted(listed: str, message: str, cluster: Path) -> None:
    (cluster / "pods").write_text(listed)
    hosts = KubernetesHosts({"trainer": 1}, image="x", port=free_ports(), start_within_s=0.1)
    with pytest.raises(ValueError, match=message):
        asyncio.run(Pods(hosts, lambda _: None, POLL_S).workers())
    assert (cluster / "deleted").exists()


def test_a_pod_that_ends_while_its_worker_starts_is_named(cluster: Path) -> None:
    (cluster / "pods").write_text(pods(pod("t-0", "Running")))
    (cluster / "next").write_text(pods(pod("t-0", "Failed")))
    hosts = KubernetesHosts({"trainer": 1}, image="x", port=free_ports())
    with pytest.raises(ValueError, match=r"t-0 has ended\. The last lines of its worker:\nerror: host 'x' has"):
        asyncio.run(Pods(hosts, print, POLL_S).workers())


def test_hosts_of_another_run_are_left_alone(cluster: Path) -> None:
    (cluster / "jobs").write_text("job.batch/ownloop-trainer\n")
    with pytest.raises(
        ValueError, match=r"default has job\.batch/ownloop-trainer already; give these hosts another name"
    ):
        asyncio.run(KubernetesHosts({"trainer": 1}, image="x").allocation(print).workers())
    assert not (cluster / "applied").exists()
    assert not (cluster / "deleted").exists()


def test_manifests_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["hosts", "kubernetes", "trainer=1", "image=lab/ownloop", "--certs", str(tmp_path / "lab")]
    for _ in range(2):  # the second time, the certificates are there
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 0
    printed, said = capsys.readouterr()
    *_, job = yaml.safe_load_all(printed)
    assert job["metadata"]["name"] == "ownloop-trainer"
    assert "--lifeline" not in job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "it holds the private keys of all pods" in said
    assert "--hosts trainer=ownloop-trainer-0.ownloop.default.svc:26600" in said


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ({"trainer": 0}, {}, "'trainer' has 0 pods"),
        ({"Trainer": 1}, {}, "a role is 'Trainer'; use at most 30 small letters"),
        ({"trainer": 1}, {"claims": ("runs",)}, "a claim is 'runs'; write NAME:/PATH"),
        ({"trainer": 1}, {"image": ""}, "image or kubectl is empty"),
    ],
)
def test_mistakes_are_named(groups: dict[str, int], options: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"image": "x", **options}
    with pytest.raises(ValueError, match=message):
        KubernetesHosts(groups, **fields)


@pytest.mark.slow
def test_the_command_of_a_pod_is_a_worker_that_ends_with_the_run(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet of a few lines runs what was applied."""
    (cluster / "pods").write_text(pods(pod("t-0", "Running")))
    real = kubernetes_hosts.output_of
    running: list[subprocess.Popen[bytes]] = []

    async def apply(command: list[str], text: str, within_s: float) -> str:
        if "apply" in command:
            _, secret, job = yaml.safe_load_all(text)
            spec = job["spec"]["template"]["spec"]
            for item in next(volume for volume in spec["volumes"] if volume["name"] == "certs")["secret"]["items"]:
                (cluster / item["path"]).parent.mkdir(exist_ok=True)
                (cluster / item["path"]).write_text(secret["stringData"][item["key"]])
            words = spec["containers"][0]["command"][2].replace("/etc/ownloop/certs", shlex.quote(str(cluster)))
            running.append(subprocess.Popen(["sh", "-c", words], env={**os.environ, "JOB_COMPLETION_INDEX": "0"}))
        return await real(command, text, within_s)

    monkeypatch.setattr(kubernetes_hosts, "output_of", apply)

    async def run() -> None:
        allocation = KubernetesHosts({"trainer": 1}, image="x", port=free_ports()).allocation(print)
        try:
            (worker,) = (await allocation.workers())["trainer"]
            assert accepts(worker, 1.0)
        finally:
            await allocation.stop()

    asyncio.run(run())
    assert wait_for_end(running[0], "the pod's worker")[0] == 0
