"""Hosts that go away while calls to them are in flight, and controllers that do. Three hosts on this machine."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from plugins.hosts.tests.controllers import LOST_AFTER_S
from plugins.hosts.tests.namespaces import Hosts, hosts_on_one_machine
from tests.waiting import LIMIT_S, wait_for_line, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTS = ("h1", "h2", "h3")
WORKER = " ownloop_hosts.worker_process "


@pytest.fixture(scope="module")
def net() -> Generator[Hosts]:
    """Hosts with workers, and `ctl` without."""
    with hosts_on_one_machine("ctl", *HOSTS) as net:
        for host in HOSTS:
            net.start_worker(host)
        yield net


def controller(net: Hosts, what: str, logs: Path, *groups: str) -> subprocess.Popen[bytes]:
    """Starts a controller in the host `ctl`."""
    return net.popen("ctl", [sys.executable, "-m", "plugins.hosts.tests.controllers", what, str(logs), *groups])


def line(process: subprocess.Popen[bytes], word: str) -> str:
    """The next line of a controller that begins with a word, without it."""
    seen: list[str] = []
    while True:
        text = wait_for_line(process.stdout, f"{word!r} from a controller that said {seen}")
        seen.append(text)
        if text.startswith(f"{word} ") or text == word:
            return text.removeprefix(word).strip()


def wait_until_gone(net: Hosts, host: str) -> None:
    """Waits until everything on a host but its worker has ended."""

    def gone() -> bool:
        workers = {*net.processes(host, " worker --listen "), *net.processes(host, WORKER)}
        return set(net.processes(host)) <= workers

    wait_until(gone, f"the end of everything on {host} but its worker", every_s=0.2)


def test_ranks_on_two_hosts_meet_and_a_death_names_its_host(net: Hosts, tmp_path: Path) -> None:
    run = controller(net, "reduce", tmp_path, "trainer=tcp://h1,tcp://h2")
    assert line(run, "added") == "5 6 7 8"
    assert line(run, "reduced") == "6.0 6.0 6.0 6.0"
    assert re.match(r"3 trainer: rank 3 \(process \d+ on h2\) died in die", line(run, "error"))
    assert run.wait(LIMIT_S) == 0
    assert (tmp_path / "trainer-2.log").read_text().startswith("[on host h2: ")
    assert "toy rank 2 of 4 says hello" in (tmp_path / "trainer-2.log").read_text()
    wait_until_gone(net, "h1")
    wait_until_gone(net, "h2")


def test_a_cut_a_kill_and_a_stopped_host_are_named_and_come_back(net: Hosts, tmp_path: Path) -> None:
    run = controller(net, "lose", tmp_path, *(f"{host}=tcp://{host}" for host in HOSTS))
    line(run, "hanging")
    net.cut("h1")
    net.kill_worker("h2")
    net.signal("h3", signal.SIGSTOP)
    errors = dict(line(run, "error").split(" ", 1) for _ in HOSTS)
    for host, how in (("h1", "has not answered"), ("h2", "its worker has ended"), ("h3", "has not answered")):
        kind, message = errors[host].split(" ", 1)
        assert kind == "HostLostError"
        if silent := re.search(r"has not answered for (\d+) s", message):
            # A look adds at most three seconds to the silence that is counted, however busy the machine is.
            assert LOST_AFTER_S <= int(silent[1]) <= LOST_AFTER_S + 3
        assert f"host {host} is lost: {how}" in message.replace("it has", "has")
    line(run, "stopped")  # nothing waits for hosts that do not answer
    wait_until_gone(net, "h1")  # the agent there has noticed too
    net.heal("h1")
    net.start_worker("h2")
    net.signal("h3", signal.SIGCONT)
    assert line(run, "again") == "6 6 6"
    assert run.wait(LIMIT_S) == 0
    assert "tcp://h2:26601" in net.log("h2").read_text()


def test_a_blip_costs_nothing_a_killed_controller_leaves_nothing(net: Hosts, tmp_path: Path) -> None:
    run = controller(net, "blip", tmp_path, "trainer=tcp://h1")
    line(run, "hanging")
    net.cut("h1")
    time.sleep(2)  # more than the second after which the next sign of life is asked for, and far less than the limit
    net.heal("h1")
    assert line(run, "survived") == "6"
    net.signal("ctl", signal.SIGKILL)
    wait_until_gone(net, "h1")
    assert net.processes("h1", WORKER)
