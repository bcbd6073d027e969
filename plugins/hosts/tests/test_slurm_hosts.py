"""Workers that a run starts through Slurm: in a job that it waits for and cancels, and in the allocation it is in."""

import asyncio
import socket
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from controller.processes.errors import HostsOverError
from ownloop_hosts.connections import Address, accepts
from ownloop_hosts.host_groups import Groups
from ownloop_hosts.starting import slurm_hosts
from ownloop_hosts.starting.slurm_hosts import SlurmHosts, Times
from ownloop_hosts.starting.slurm_workers import NewJob, OwnAllocation
from plugins.hosts.tests.slurm_stand_in import scripts
from plugins.hosts.tests.stand_ins import free_ports, install, running
from tests.waiting import LIMIT_S, until

NODES = ("127.0.0.1", "127.0.0.2")
FAKE_WORKER = """
echo "$@" >> $STAND_INS/workers
if [ $SLURMD_NODENAME = "$FAILS" ]; then echo "error: no such thing"; exit 3; fi
echo "listening on tls://$SLURMD_NODENAME:$FAKE_PORT (process 1)"
words="$*"
lifeline=${words##*--lifeline }
exec bash -c 'exec 3<>/dev/tcp/${0%:*}/${0##*:}; read -u 3' "${lifeline%% *}"
"""
TIMES = Times(0.05, 0.05, 0.05)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs of a cluster of two nodes."""
    install(tmp_path, monkeypatch, **scripts(), fake_python=FAKE_WORKER)
    (tmp_path / "nodes").write_text(" ".join(NODES))
    for name in ("SLURM_JOB_ID", "FAILS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(slurm_hosts, "_CANCEL_S", LIMIT_S)
    return tmp_path


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Generator[int]:
    """A port on which fake workers seem to listen."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        monkeypatch.setenv("FAKE_PORT", str(server.getsockname()[1]))
        yield server.getsockname()[1]


def fake_hosts(cluster: Path, partition: str = "") -> SlurmHosts:
    """One node for each of two roles, whose workers are fakes."""
    return SlurmHosts(
        {"trainer": 1, "generator": 1},
        python=str(cluster / "fake_python"),
        folder=str(cluster / "shared"),
        partition=partition,
    )


def groups(port: int) -> Groups:
    """Where the fakes listen."""
    return {
        "trainer": (Address("tls", NODES[0], port),),
        "generator": (Address("tls", NODES[1], port),),
    }


@pytest.mark.seconds
def test_a_job_is_waited_for_and_its_workers_end_with_the_run(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CERT", "KEY", "CA"):  # sbatch passes the controller's environment on
        monkeypatch.setenv(f"HYPERACTOR_TLS_{name}", "/of/the/controller")
    (cluster / "pending").write_text("2")
    (cluster / "busy").touch()
    told: list[str] = []
    folder, port = str(cluster / "shared"), free_ports()
    hosts = SlurmHosts({"trainer": 1}, partition="gpu", gpus_per_node=8, folder=folder, port=port)

    async def run() -> None:
        allocation = NewJob(hosts, told.append, TIMES)
        try:
            (at,) = (await allocation.workers())["trainer"]
            assert at.scheme == "tls"
            assert accepts(at, 1.0)
            (worker,) = running(cluster, "--lifeline")
            child = psutil.Process(worker).children()[0]
            assert child.environ()["HYPERACTOR_TLS_CERT"].endswith(f"/certs/{NODES[0]}/cert.pem")
            assert await allocation.workers() == {"trainer": (at,)}
            (folder,) = (cluster / "shared").iterdir()
            assert folder.stat().st_mode & 0o77 == 0
            assert (folder / "certs" / NODES[0] / "key.pem").stat().st_mode & 0o77 == 0
        finally:
            await allocation.stop()
        assert not list((cluster / "shared").iterdir())
        await until(lambda: not running(cluster, "--lifeline") and not accepts(at, 1.0), "the end of the worker")

    asyncio.run(run())
    assert told == [
        "Slurm job 1 for 1 nodes is PENDING (Priority)",
        "Slurm job 1 has 127.0.0.1; starting workers",
    ]
    script = (cluster / "job-1.sh").read_text()
    for option in ("--nodes=1", "--partition=gpu", "--gpus-per-node=8", "--exclusive", "--mem=0", "--no-kill"):
        assert f"#SBATCH {option}\n" in script
    assert (cluster / "job-1.cancelled").exists()


def test_a_job_that_ended_begins_again_when_the_run_restarts(cluster: Path, port: int) -> None:
    told: list[str] = []

    async def run() -> None:
        allocation = NewJob(fake_hosts(cluster), told.append, TIMES)
        try:
            assert await allocation.workers() == await allocation.revived() == groups(port)
            (cluster / "job-1.over").write_text("TIMEOUT")
            with pytest.raises(HostsOverError, match="Slurm job 1 is TIMEOUT"):
                await allocation.revived()
            assert await allocation.workers() == groups(port)
        finally:
            await allocation.stop()

    asyncio.run(run())
    assert "Slurm job 1 is TIMEOUT; starting again" in told
    assert {path.name for path in cluster.glob("*.cancelled")} == {"job-1.cancelled", "job-2.cancelled"}


def test_a_wait_that_is_interrupted_cancels_the_job(cluster: Path) -> None:
    (cluster / "pending").write_text("1000")
    told: list[str] = []

    async def run() -> None:
        waiting = asyncio.create_task(NewJob(fake_hosts(cluster), told.append, TIMES).workers())
        await until(lambda: told, "the job")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    assert (cluster / "job-1.cancelled").exists()
    assert not list((cluster / "shared").iterdir())


def test_the_allocation_of_this_process_is_used(cluster: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(NODES))

    async def run() -> None:
        allocation = OwnAllocation(fake_hosts(cluster), print, "7", TIMES)
        try:
            assert await allocation.workers() == groups(port)
            (step,) = running(cluster, "slurm_stand_in srun")
            assert {"--jobid=7", "--overlap", "--cpu-bind=none"} <= set(psutil.Process(step).cmdline())
        finally:
            await allocation.stop()
        assert not running(cluster, "slurm_stand_in srun")
        with pytest.raises(
            ValueError, match=r"the allocation 7 has the nodes 127\.0\.0\.1, 127\.0\.0\.2; 3 are needed"
        ):
            await SlurmHosts({"trainer": 3}, folder=str(cluster / "shared")).allocation(print).workers()

    asyncio.run(run())
    assert not list(cluster.glob("job-*"))


def test_a_node_whose_worker_fails_is_named_with_what_it_said(
    cluster: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", NODES[1])
    with pytest.raises(ValueError, match=r"^127\.0\.0\.2: its worker ended with status 3\n(.*\n)*error: no such thing"):
        asyncio.run(NewJob(fake_hosts(cluster), print, TIMES).workers())
    assert (cluster / "job-1.cancelled").exists()


def test_a_job_that_ends_while_its_workers_start_is_named(cluster: Path) -> None:
    (cluster / "fake_python").write_text('#!/bin/sh\necho FAILED > "$STAND_INS/job-1.over"\nexec sleep 1000\n')
    with pytest.raises(ValueError, match="Slurm job 1 is FAILED"):
        asyncio.run(NewJob(fake_hosts(cluster), print, TIMES).workers())


def test_what_sbatch_says_is_said(cluster: Path) -> None:
    with pytest.raises(ValueError, match="invalid partition specified: closed"):
        asyncio.run(fake_hosts(cluster, partition="closed").allocation(print).workers())


def test_a_machine_without_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="there is no program 'sbatch' here"):
        asyncio.run(SlurmHosts({"trainer": 1}, folder=str(tmp_path)).allocation(print).workers())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ({"trainer": 0}, (), "'trainer' has 0 nodes; give it at least 1"),
        ({"trainer": 1}, ("--qos=a\n#SBATCH --x",), "write it in one word"),
        ({"trainer": 1}, ("-x",), "write it in one word"),
    ],
)
def test_mistakes_are_named(groups: dict[str, int], options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmHosts(groups, options=options)
