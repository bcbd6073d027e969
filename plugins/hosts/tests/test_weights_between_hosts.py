"""Weights on their way between hosts of their own network: what is sent, and what an interruption does."""

import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from plugins.hosts.tests.namespaces import Hosts, hosts_on_one_machine
from plugins.hosts.tests.weight_processes import Process
from rl.weights.version import UnknownVersionError, WeightsError
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow

MEGABYTES = 30.0


@contextmanager
def _processes(
    folder: Path, *names: str, link_timeout_s: float
) -> Generator[tuple[Hosts, Process, dict[str, Process]]]:
    """A trainer on h1 and receiving processes on the other hosts."""
    limit = str(link_timeout_s)
    with hosts_on_one_machine("h1", *names) as net:
        module = [sys.executable, "-m", "plugins.hosts.tests.weight_processes"]
        for name in names:
            net.popen(name, [*module, "receive", str(folder / name), limit], log=folder / f"{name}.log")
        receiving = {name: Process(folder / name) for name in names}
        hosts = [f"{name}={net.addresses[name]}={folder / name}" for name in names]
        net.popen("h1", [*module, "push", str(folder / "h1"), limit, *hosts], log=folder / "h1.log")
        yield net, Process(folder / "h1"), receiving


def test_weights_between_hosts(tmp_path: Path) -> None:
    with _processes(tmp_path, "h2", "h3", "h4", link_timeout_s=LIMIT_S) as (net, trainer, hosts):
        # Three hosts cost the trainer's network as much as one.
        sent: dict[int, int] = {}
        version = 0
        for names in (("h2",), ("h2", "h3", "h4")):
            for _ in range(2):
                version += 1
                before = net.bytes_sent("h1")
                record, _ = trainer.call("push", MEGABYTES, version, names)
                sent[len(names)] = net.bytes_sent("h1") - before
                for name in names:
                    hosts[name].call("pull", record)
                    assert hosts[name].call("differing", MEGABYTES, version) == []
        assert 0.99 * MEGABYTES * 1e6 < sent[1] < 1.1 * MEGABYTES * 1e6
        assert sent[3] < 1.5 * sent[1]

        # A short interruption costs nothing but its time.
        net.cut("h3")
        before = net.bytes_sent("h1")
        with ThreadPoolExecutor() as pool:
            pushing = pool.submit(trainer.call, "push", MEGABYTES, version + 1, ("h2", "h3", "h4"))
            wait_until(lambda: net.bytes_sent("h1") > before + 0.1 * MEGABYTES * 1e6, "the beginning of a push")
            assert not pushing.done()
            net.heal("h3")
            record, _ = pushing.result()
        assert len(record.location) == 3


def test_a_host_that_is_cut_off_keeps_its_version(tmp_path: Path) -> None:
    with _processes(tmp_path, "h2", "h3", link_timeout_s=4) as (net, trainer, hosts):
        first, _ = trainer.call("push", MEGABYTES, 1, ("h2", "h3"))
        net.cut("h3")
        second, _ = trainer.call("push", MEGABYTES, 2, ("h2", "h3"))
        hosts["h2"].call("pull", second)
        assert hosts["h2"].call("differing", MEGABYTES, 2) == []
        with pytest.raises(UnknownVersionError, match="version 2 is not on this host"):
            hosts["h3"].call("pull", second)
        hosts["h3"].call("pull", first)
        assert hosts["h3"].call("differing", MEGABYTES, 1) == []
        with pytest.raises(WeightsError, match="version 3 reached no generator host; h3: "):
            trainer.call("push", MEGABYTES, 3, ("h3",))
        net.heal("h3")
        fourth, _ = trainer.call("push", MEGABYTES, 4, ("h2", "h3"))
        for name in ("h2", "h3"):
            hosts[name].call("pull", fourth)
            assert hosts[name].call("differing", MEGABYTES, 4) == []


@pytest.mark.e2e
@pytest.mark.parametrize(("asked", "taken"), [("auto", "network"), pytest.param("nccl", "nccl", marks=pytest.mark.gpu)])
def test_weights_between_the_hosts_of_a_launcher(tmp_path: Path, asked: str, taken: str) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    with hosts_on_one_machine("ctl", "h1", "h2") as net:
        for host in ("h1", "h2"):
            net.start_worker(host)
        command = [
            sys.executable,
            "-m",
            "plugins.hosts.tests.push_controller",
            str(model),
            str(tmp_path / "logs"),
            asked,
        ]
        printed = net.run("ctl", command, timeout_s=200)
    assert f"pushed {taken} 2 True" in printed
    assert "sampled 0" in printed  # one to three tokens: the end is sampled too
