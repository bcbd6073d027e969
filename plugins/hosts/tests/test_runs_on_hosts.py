"""Whole runs over three hosts: they train what a run on one host trains, and outlive the loss of a host."""

import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from controller.runs.folder import read_metrics
from plugins.hosts.tests.namespaces import Hosts, hosts_on_one_machine
from tests.e2e.cli_runs import ROOT, metric_rows, model_hash
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLI = [sys.executable, "-m", "controller.commands.cli"]
RECIPE = ROOT / "tests" / "e2e" / "tiny_recipe.py"
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
    fixed = ["--runs", str(folder), "--name", name, "--num-steps", "4", "--checkpoint-every", "1"]
    layout = ["--trainer.data-parallel-shard", "2"]
    return ownloop_run(net, folder, name, str(RECIPE), *fixed, *layout, *options)


def ownloop_run(net: Hosts, folder: Path, name: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    """Starts `ownloop run` in the host `ctl`. What it prints is in `<name>.txt`."""
    return ownloop(net, folder, name, "run", *arguments, **env)


def ownloop(net: Hosts, folder: Path, name: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    """Starts a command, as `ownloop_run` does."""
    env |= {"OWNLOOP_TINY_MODEL": str(folder / "model")}
    return net.popen("ctl", [*CLI, *arguments], env, folder / f"{name}.txt")


def wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int, printed: Path) -> None:
    """Waits until a run, whose output goes to `printed`, has recorded a step."""
    end = time.monotonic() + 240
    while not any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")):
        assert run.poll() is None, printed.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_three_hosts_train_what_one_host_trains(net: Hosts, on_one_host: Path, tmp_path: Path) -> None:
    run = start(net, tmp_path, "three", OVER_HOSTS)
    assert run.wait(timeout=300) == 0, (tmp_path / "three.txt").read_text()
    assert metric_rows(tmp_path / "three") == metric_rows(on_one_host)
    assert model_hash(tmp_path / "three") == model_hash(on_one_host)
    assert "on host h2: " in (tmp_path / "three" / "logs" / "trainer-1.log").read_text()


def test_other_commands_use_the_hosts_of_a_run(net: Hosts, tmp_path: Path) -> None:
    run = start(net, tmp_path, "run", (*OVER_HOSTS, "--keep-checkpoints", "4"))
    assert run.wait(timeout=300) == 0, (tmp_path / "run.txt").read_text()
    recipe, layout = str(RECIPE), ("--trainer.data-parallel-shard", "2")
    printed = {
        "export": ("export", str(tmp_path / "run")),
        "eval": ("eval", str(tmp_path / "run"), recipe, "--step", "2", *OVER_HOSTS),
        "parity": ("parity", recipe, *layout, *OVER_HOSTS),
    }
    for name, words in printed.items():
        command = ownloop(net, tmp_path, name, *words)
        assert command.wait(timeout=200) == 0, (tmp_path / f"{name}.txt").read_text()
    exports = tmp_path / "run" / "exports"
    (trained,) = (tmp_path / "run" / "model").glob("*.safetensors")
    assert (exports / "step-00004" / trained.name).read_bytes() == trained.read_bytes()
    rewards = {row["step"]: row["eval_reward"] for row in metric_rows(tmp_path / "run") if "eval_reward" in row}
    assert f": {rewards[2]:.3f} " in (tmp_path / "eval.txt").read_text()
    assert (exports / "step-00002" / "config.json").is_file()
    assert "mean |mismatch|" in (tmp_path / "parity.txt").read_text()


def test_a_run_goes_on_on_the_hosts_that_are_left(net: Hosts, on_one_host: Path, tmp_path: Path) -> None:
    run = start(net, tmp_path, "cut", OVER_HOSTS)
    wait_for_step(run, tmp_path / "cut", 2, tmp_path / "cut.txt")
    net.cut("h2")
    assert run.wait(timeout=300) == 0, (tmp_path / "cut.txt").read_text()
    assert "host h2 is lost" in (tmp_path / "cut.txt").read_text()
    assert metric_rows(tmp_path / "cut") == metric_rows(on_one_host)
    assert model_hash(tmp_path / "cut") == model_hash(on_one_host)


def test_without_a_shared_folder_checkpoints_are_collected(on_one_host: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with hosts_on_one_machine("ctl", "h1", "h2", own_folders=[runs]) as net:
        for host in ("h1", "h2"):
            net.start_worker(host)
        of_host = {host: net.folder / host / runs.relative_to("/") for host in ("ctl", "h1", "h2")}
        folder = of_host["ctl"] / "apart"
        options = ("--runs", str(runs), "--hosts", "trainer=tcp://h1,tcp://h2", "--keep-checkpoints", "1")
        run = start(net, tmp_path, "apart", options)
        wait_for_step(run, folder, 3, tmp_path / "apart.txt")
        net.signal("ctl", signal.SIGKILL, "controller.commands.cli")
        run.wait(timeout=LIMIT_S)
        saved = sorted((folder / "checkpoints").glob("step-*/policy"))[-1]
        assert {file.name for file in saved.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
        assert ownloop_run(net, tmp_path, "again", "--resume", str(runs / "apart")).wait(timeout=300) == 0
        printed = (folder / "logs" / "controller.log").read_text()
        assert "is not shared with h1, h2; the controller collects what they write" in printed
        assert metric_rows(folder) == metric_rows(on_one_host)
        assert model_hash(folder) == model_hash(on_one_host)
        for host in ("h1", "h2"):
            assert [file for file in of_host[host].rglob("*") if file.is_file()] == []


def test_a_run_over_tls(tmp_path: Path) -> None:
    with hosts_on_one_machine("ctl", "h1", "h2") as net:
        lab = net.folder / "lab"
        net.run("ctl", [*CLI, "certs", "ctl", "h1", "h2", "--to", str(lab)])
        for host in ("h1", "h2"):
            net.start_worker(host, "--listen", f"{host}:26600", "--certs", str(lab / host))
        fixed = (str(RECIPE), "--runs", str(tmp_path), "--name", "tls", "--num-steps", "2")
        hosts = ("--hosts", "trainer=h1", "--hosts", "generator=h2")
        run = ownloop_run(net, tmp_path, "tls", *fixed, *hosts, OWNLOOP_CERTS=str(lab / "ctl"))
        assert run.wait(timeout=200) == 0, (tmp_path / "tls.txt").read_text()
    assert {row["step"] for row in read_metrics(tmp_path / "tls" / "metrics.jsonl")} == {0, 1, 2}


@pytest.mark.parametrize("layout", [("num-replicas", "2"), ("tensor-parallel", "2")], ids=["replicas", "ranks"])
def test_a_generator_on_two_hosts_samples_as_on_one(net: Hosts, tmp_path: Path, layout: tuple[str, str]) -> None:
    option, count = layout
    fixed = (str(RECIPE), "--runs", str(tmp_path), "--num-steps", "3", f"--generator.{option}", count)
    for name, hosts in (
        ("one", ()),
        ("two", ("--hosts", "trainer=tcp://h1", "--hosts", "generator=tcp://h2,tcp://h3")),
    ):
        run = ownloop_run(net, tmp_path, name, *fixed, "--name", name, *hosts)
        assert run.wait(timeout=200) == 0, (tmp_path / f"{name}.txt").read_text()
    one, two = (metric_rows(tmp_path / name) for name in ("one", "two"))
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for ours, theirs in zip(one, two, strict=True):
        # A replica computes what arrives together in one batch, whose float32 sums are rounded differently.
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5, nan_ok=True)
    logs = ("generator-0-0", "generator-1-0") if option == "num-replicas" else ("generator-0", "generator-1")
    for log, host in zip(logs, ("h2", "h3"), strict=True):
        assert f"on host {host}: " in (tmp_path / "two" / "logs" / f"{log}.log").read_text()


def test_a_replica_of_two_hosts_goes_on_on_the_one_that_is_left(net: Hosts, tmp_path: Path) -> None:
    options = (
        "--generator.tensor-parallel",
        "2",
        "--hosts",
        "trainer=tcp://h1",
        "--hosts",
        "generator=tcp://h2,tcp://h3",
    )
    fixed = (str(RECIPE), "--runs", str(tmp_path), "--num-steps", "6")
    run = ownloop_run(net, tmp_path, "cut", *fixed, "--name", "cut", *options)
    wait_for_step(run, tmp_path / "cut", 2, tmp_path / "cut.txt")
    net.cut("h3")
    assert run.wait(timeout=300) == 0, (tmp_path / "cut.txt").read_text()
    log = (tmp_path / "cut" / "logs" / "controller.log").read_text()
    assert "generator is started again: generator: host h3 is lost" in log
    assert metric_rows(tmp_path / "cut")[-1]["step"] == 6
    assert "on host h2: " in (tmp_path / "cut" / "logs" / "generator-1.log").read_text()


def test_the_recipe_of_make_train_learns_on_two_hosts(net: Hosts, tmp_path: Path) -> None:
    """Takes 4 to 7 minutes on two cores."""
    hosts = ("--hosts", "trainer=tcp://h1", "--hosts", "generator=tcp://h2")
    run = ownloop_run(net, tmp_path, "learns", "grpo_smollm2_cpu", "--runs", str(tmp_path), "--name", "learns", *hosts)
    assert run.wait(timeout=900) == 0, (tmp_path / "learns.txt").read_text()
    rewards = [row["eval_reward"] for row in metric_rows(tmp_path / "learns") if "eval_reward" in row]
    assert rewards[-1] - rewards[0] >= 0.15
