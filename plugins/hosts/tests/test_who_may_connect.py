"""A worker with TLS: `ownloop doctor` of its authority may do everything, a stranger nothing. And one without TLS."""

import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from ownloop_hosts.certificates import make_certificates
from plugins.hosts.tests.namespaces import Hosts, hosts_on_one_machine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLI = [sys.executable, "-m", "controller.commands.cli"]


@pytest.fixture(scope="module")
def net() -> Generator[Hosts]:
    """`h1` has a worker with TLS, `h2` one without, and both of them come with a controller's host `ctl`."""
    with hosts_on_one_machine("ctl", "h1", "h2") as net:
        net.run("ctl", [*CLI, "certs", "ctl", "h1", "--to", str(net.folder / "lab")])
        net.start_worker("h1", "--listen", "h1:26600", "--certs", str(net.folder / "lab"))
        net.start_worker("h2")
        yield net


def doctor(net: Hosts, *arguments: str) -> tuple[int, str]:
    """The status and the output of `ownloop doctor` on `ctl`."""
    run = net.popen("ctl", [*CLI, "doctor", "--mb", "8", *arguments])
    return run.wait(timeout=60), run.communicate()[0].decode()


def test_the_controllers_own_hosts_are_examined(net: Hosts) -> None:
    status, output = doctor(net, "--hosts", "trainer=h1", "--certs", str(net.folder / "lab"))
    assert status == 0, output
    assert "nothing was found that would fail" in output
    assert re.search(r"^h1 +tls://h1:26600 +10\.77\.0\.2 .* none .* GB +[+-]0\.", output, re.MULTILINE)
    assert re.search(r"^controller +\d+$", output, re.MULTILINE)
    assert re.search(r"^h1 +\d+$", output, re.MULTILINE)


def test_a_host_without_a_worker_is_named(net: Hosts) -> None:
    status, output = doctor(net, "--hosts", "trainer=h1:26700", "--certs", str(net.folder / "lab"))
    assert status == 1
    assert "would fail: h1: no worker listens on its ports 26700 to 26709; start one with `ownloop worker" in output


def test_a_stranger_cannot_run_anything(net: Hosts, tmp_path: Path) -> None:
    (other,) = make_certificates(tmp_path / "other", ["h2"])
    ours = {f"HYPERACTOR_TLS_{name.upper()}": str(other / f"{name}.pem") for name in ("cert", "key", "ca")}
    attempts = {
        "other authority": ("tls", "tls://h1:26600", ours),
        "no certificate": ("tls", "tls://h1:26600", {"HYPERACTOR_TLS_CA": str(net.folder / "lab" / "h1" / "ca.pem")}),
        "no TLS": ("tcp", "tcp://h1:26600", {}),
        "open worker": ("tcp", "tcp://h2:26600", {}),  # shows that the attempt itself works
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, (transport, worker, env) in attempts.items():
        attempt = [sys.executable, "-m", "plugins.hosts.tests.stranger", transport, worker, str(tmp_path / name)]
        running[name] = net.popen("h2", attempt, env)
    outputs = {name: process.communicate(timeout=60)[0].decode() for name, process in running.items()}
    assert {name for name in attempts if (tmp_path / name).exists()} == {"open worker"}, outputs
    assert "it ran" in outputs["open worker"]


def test_a_worker_without_tls_says_what_that_means(net: Hosts) -> None:
    assert (
        "has no TLS (--insecure). Any process that reaches tcp://h2:26600 can run programs" in net.log("h2").read_text()
    )
