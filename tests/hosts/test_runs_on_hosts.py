"""Whole runs over three hosts: they train what a run on one host trains, and outlive the loss of a host."""

import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from rl.runs.folder import read_metrics
from tests.e2e.cli_runs import ROOT, metric_rows, model_hash
from tests.hosts.namespaces import Hosts, hosts_on_one_machine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTS = ("h1", "h2", "h3")
OVER_HOSTS = ("--hosts", "trainer=tcp://h1,tcp://h2", "--hosts", "generator=tcp://h3")


@pytest.fixture
def net() -> Generator[Hosts]:
    """Hosts with workers, and `ctl` without."""
    with hosts_on_one_machine("ctl", *HOSTS) as net:
        for host in HOSTS:
            net.start_worker(host)
        yield net


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with all processes on one host."""
    folder = tmp_path_factory.mktemp("one")
    with hosts_on_one_machine("ctl") as net:
        run = start(net, folder, "one", ())
        assert run.wait(timeout=300) == 0, run.communicate()[0].decode()
    return folder / "one"


def start(net: Hosts, folder: Path, name: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a run of two trainer ranks and a generator, of four steps with a checkpoint after each."""
    recipe, log = str(ROOT / "tests" / "e2e" / "tiny_recipe.py"), folder / f"{name}.txt"
    fixed = ["--runs", str(folder), "--name", name, "--num-steps", "4", "--checkpoint-every", "1"]
    layout = ["--trainer.data-parallel-shard", "2"]
    command = [sys.executable, "-m", "controller.commands.cli", "run", recipe, *fixed, *layout, *options]
    return net.popen("ctl", command, {"OWNLOOP_TINY_MODEL": str(folder / "model")}, log)


def wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Waits until a run has recorded a step."""
    end = time.monotonic() + 240
    while not any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")):
        assert run.poll() is None, folder.with_suffix(".txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_three_hosts_train_what_one_host_trains(net: Hosts, on_one_host: Path, tmp_path: Path) -> None:
    run = start(net, tmp_path, "three", OVER_HOSTS)
    assert run.wait(timeout=300) == 0, (tmp_path / "three.txt").read_text()
    assert metric_rows(tmp_path / "three") == metric_rows(on_one_host)
    assert model_hash(tmp_path / "three") == model_hash(on_one_host)
    assert "on host h2: " in (tmp_path / "three" / "logs" / "trainer-1.log").read_text()


def test_a_run_goes_on_on_the_hosts_that_are_left(net: Hosts, on_one_host: Path, tmp_path: Path) -> None:
    run = start(net, tmp_path, "cut", OVER_HOSTS)
    wait_for_step(run, tmp_path / "cut", 2)
    net.cut("h2")
    assert run.wait(timeout=300) == 0, (tmp_path / "cut.txt").read_text()
    assert "host h2 is lost" in (tmp_path / "cut.txt").read_text()
    assert metric_rows(tmp_path / "cut") == metric_rows(on_one_host)
    assert model_hash(tmp_path / "cut") == model_hash(on_one_host)
