"""Whole runs on hosts whose workers the run starts itself: they train what a run on one host trains, and leave nothing.

Their options are those of docs/ssh.md and docs/slurm.md: two trainer ranks on two hosts, a generator on a third.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from controller.runs.folder import read_metrics
from plugins.hosts.tests.namespaces import Hosts
from plugins.hosts.tests.started_hosts import HOSTS, PAGES, command_line, environment, hosts_of_pages, run_options
from tests.e2e.cli_runs import ROOT, metric_rows, model_hash
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that each host has for itself: the model is copied."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def net(models: Path) -> Generator[Hosts]:
    """The hosts of the pages."""
    with hosts_of_pages(models) as net:
        yield net


@pytest.fixture(scope="module")
def on_one_host(net: Hosts, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with all processes on one host."""
    folder = tmp_path_factory.mktemp("one")
    run = start(net, models, folder, ("--trainer.data-parallel-shard", "2"))
    assert run.wait(timeout=200) == 0, (folder / "run.txt").read_text()
    return folder / "run"


def start(net: Hosts, models: Path, folder: Path, options: Sequence[str], steps: int = 4) -> subprocess.Popen[bytes]:
    """Starts a run on `ctl`, with a checkpoint after each step."""
    recipe = str(ROOT / "tests" / "e2e" / "tiny_recipe.py")
    fixed = ["--runs", str(folder), "--name", "run", "--num-steps", str(steps), "--checkpoint-every", "1"]
    env = {**environment(net, folder), "OWNLOOP_TINY_MODEL": str(models / "model")}
    return net.popen("ctl", command_line(["ownloop", "run", recipe, *fixed, *options]), env, folder / "run.txt")


def wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Waits until a run has recorded a step."""

    def recorded() -> bool:
        if any(row["step"] >= step for row in read_metrics(folder / "run" / "metrics.jsonl")):
            return True
        assert run.poll() is None, (folder / "run.txt").read_text()
        return False

    wait_until(recorded, f"step {step}", limit_s=200, every_s=0.05)


def kill_workers(net: Hosts, *hosts: str) -> None:
    """Kills `ownloop worker`; what it started ends with it."""
    for host in hosts:
        for pid in net.processes(host, "--lifeline"):
            os.kill(pid, signal.SIGKILL)


def end_job(net: Hosts) -> None:
    """What Slurm does at the time limit."""
    newest = max(net.folder.glob("job-*.pid"), key=lambda path: path.stat().st_mtime)
    newest.with_suffix(".over").write_text("TIMEOUT")
    kill_workers(net, *HOSTS)


@pytest.mark.parametrize(
    ("page", "end_workers", "said"),
    [
        ("ssh.md", lambda net: kill_workers(net, "n2"), "starting workers over ssh on n2"),
        ("slurm.md", end_job, "is TIMEOUT; starting again"),
    ],
    ids=PAGES,
)
def test_a_run_outlives_its_workers_and_leaves_nothing(
    page: str,
    end_workers: Callable[[Hosts], None],
    said: str,
    net: Hosts,
    models: Path,
    on_one_host: Path,
    tmp_path: Path,
) -> None:
    run = start(net, models, tmp_path, run_options(page))
    wait_for_step(run, tmp_path, 2)
    end_workers(net)
    assert run.wait(timeout=250) == 0, (tmp_path / "run.txt").read_text()
    assert said in (tmp_path / "run.txt").read_text()
    assert metric_rows(tmp_path / "run") == metric_rows(on_one_host)
    assert model_hash(tmp_path / "run") == model_hash(on_one_host)
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert all(f"listening on tls://{host}:2660" in log for host in HOSTS)
    assert [net.processes(host, "--lifeline") for host in HOSTS] == [[], [], []]


@pytest.mark.parametrize("page", PAGES)
def test_nothing_outlives_a_controller_that_is_killed(page: str, net: Hosts, models: Path, tmp_path: Path) -> None:
    run = start(net, models, tmp_path, run_options(page), steps=200)
    wait_for_step(run, tmp_path, 1)
    for pid in net.processes("ctl", "controller.commands.cli run"):
        os.kill(pid, signal.SIGKILL)

    def ended() -> bool:
        return all(net.processes(host, "python") == net.processes(host, "node_server") for host in HOSTS)

    wait_until(ended, "the end of everything that the controller had started", every_s=0.1)
