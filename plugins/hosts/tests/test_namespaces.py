"""The stand-in for several machines: what the other tests of this folder rely on."""

import sys
from pathlib import Path

import pytest

from plugins.hosts.tests.namespaces import hosts_on_one_machine
from tests.waiting import LIMIT_S, wait_for_line

pytestmark = pytest.mark.seconds

ANSWER = """
import socket
with socket.create_server(("0.0.0.0", 700)) as server:
    print("ready", flush=True)
    for _ in range(2):
        server.accept()[0].close()
"""
ASK = "import socket, sys; socket.create_connection(('h1', 700), timeout=float(sys.argv[1]))"
WHO = "import socket; from rl.system.hardware import host_identity; print(socket.gethostname(), host_identity())"


def test_hosts_are_apart_and_a_cut_is_silent(tmp_path: Path) -> None:
    with hosts_on_one_machine("h1", "h2", own_folders=[tmp_path]) as net:
        who = [net.run(host, [sys.executable, "-c", WHO]).split() for host in ("h1", "h2")]
        assert [name for name, _ in who] == ["h1", "h2"]
        assert who[0][1] != who[1][1]
        net.run("h1", ["touch", str(tmp_path / "file")])
        assert net.run("h2", ["ls", str(tmp_path)]) == ""

        server = net.popen("h1", [sys.executable, "-c", ANSWER])
        assert wait_for_line(server.stdout, "a server in a host") == "ready"
        ask = [sys.executable, "-c", ASK]
        net.run("h2", [*ask, "60"], timeout_s=LIMIT_S)
        net.cut("h1")
        with pytest.raises(AssertionError, match="TimeoutError"):
            net.run("h2", [*ask, "0.5"], timeout_s=LIMIT_S)
        net.heal("h1")
        net.run("h2", [*ask, "60"], timeout_s=LIMIT_S)
        left = net.popen("h2", ["sleep", "1000"])
    assert left.returncode != 0  # it has ended with its host
