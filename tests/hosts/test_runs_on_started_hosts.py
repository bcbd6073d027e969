"""Whole runs on hosts whose workers the run starts itself: they train what a run on one host trains, and leave nothing.

`ssh` and Slurm's programs are stand-ins, whose commands a small server runs on the simulated hosts.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from rl.runs.folder import read_metrics
from tests.e2e.cli_runs import ROOT, metric_rows, model_hash
from tests.hosts import slurm_stand_in
from tests.hosts.namespaces import Hosts, hosts_on_one_machine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTS = ("h1", "h2")
WAYS = {"ssh": ("ssh", "trainer=h1", "generator=h2"), "slurm": ("slurm", "trainer=1", "generator=1", "partition=gpu")}
SSH = f'while [ "$1" != -- ]; do shift; done; exec {sys.executable} -m tests.hosts.node_server "$2" "$3"'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that each host has for itself."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def net(models: Path) -> Generator[Hosts]:
    """Hosts without workers and models, which run what the stand-ins on `ctl` give them."""
    with hosts_on_one_machine("ctl", *HOSTS, own_folders=[models]) as net:
        for name, script in {"ssh": SSH, **slurm_stand_in.scripts()}.items():
            (net.folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (net.folder / name).chmod(0o755)
        (net.folder / "nodes").write_text(" ".join(HOSTS))
        (net.folder / "pending").write_text("2")
        for host in HOSTS:
            server = net.popen(host, [sys.executable, "-m", "tests.hosts.node_server", host])
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
        yield net


@pytest.fixture(scope="module")
def on_one_host(net: Hosts, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with all processes on one host."""
    folder = tmp_path_factory.mktemp("one")
    assert start(net, models, folder, "one", ()).wait(timeout=200) == 0, (folder / "one.txt").read_text()
    return folder / "one"


def start(
    net: Hosts, models: Path, folder: Path, name: str, options: Sequence[str], steps: int = 2
) -> subprocess.Popen[bytes]:
    """Starts a run on `ctl`."""
    recipe = str(ROOT / "tests" / "e2e" / "tiny_recipe.py")
    fixed = ["--runs", str(folder), "--name", name, "--num-steps", str(steps), "--evaluate-every", "10"]
    command = [sys.executable, "-m", "controller.commands.cli", "run", recipe, *fixed, *options]
    env = {
        "OWNLOOP_TINY_MODEL": str(models / "model"),
        "OWNLOOP_CACHE": str(folder / "cache"),
        "STAND_INS": str(net.folder),
        "PATH": f"{net.folder}:{os.environ['PATH']}",
    }
    return net.popen("ctl", command, env, folder / f"{name}.txt")


@pytest.mark.parametrize("way", WAYS)
def test_a_run_starts_its_workers_and_leaves_nothing(
    way: str, net: Hosts, models: Path, on_one_host: Path, tmp_path: Path
) -> None:
    run = start(net, models, tmp_path, way, ("--hosts", *WAYS[way]))
    assert run.wait(timeout=250) == 0, (tmp_path / f"{way}.txt").read_text()
    assert metric_rows(tmp_path / way) == metric_rows(on_one_host)
    assert model_hash(tmp_path / way) == model_hash(on_one_host)
    log = (tmp_path / way / "logs" / "controller.log").read_text()
    assert "listening on tls://h1:2660" in log
    assert "listening on tls://h2:2660" in log
    assert [net.processes(host, "--lifeline") for host in HOSTS] == [[], []]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_outlives_a_controller_that_is_killed(way: str, net: Hosts, models: Path, tmp_path: Path) -> None:
    run = start(net, models, tmp_path, "killed", ("--hosts", *WAYS[way]), steps=200)
    end = time.monotonic() + 200
    while not read_metrics(tmp_path / "killed" / "metrics.jsonl"):
        assert run.poll() is None, (tmp_path / "killed.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.2)
    for pid in net.processes("ctl", "controller.commands.cli run"):
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while any(net.processes(host, "python") != net.processes(host, "node_server") for host in HOSTS):
        assert time.monotonic() < killed + 30, [net.processes(host) for host in HOSTS]
        time.sleep(0.1)
    print(f"{way}: everything has ended {time.monotonic() - killed:.1f} s after the controller")
