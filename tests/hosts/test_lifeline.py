"""The connection by which an agent knows that its controller runs."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from controller.hosts.lifeline import Lifeline, hold
from tests.hosts.namespaces import hosts_on_one_machine

CONTROLLER = """
import sys, time
from controller.hosts.lifeline import Lifeline
lifelines = [Lifeline(sys.argv[1]) for _ in range(3)]
print(*(lifeline.end[1] for lifeline in lifelines), flush=True)
time.sleep(1000)
"""
AGENT = """
import sys, threading
from controller.hosts.lifeline import hold
ended = threading.Event()
hold((sys.argv[1], int(sys.argv[2])), 2.0, ended.set)
print("held", flush=True)
print("ended" if ended.wait(float(sys.argv[3])) else "held on", flush=True)
"""


def test_the_controller_gives_a_host_up() -> None:
    lifeline, ended = Lifeline("127.0.0.1"), threading.Event()
    hold(lifeline.end, 20.0, ended.set)
    assert not ended.wait(0.2)
    lifeline.cut()
    assert ended.wait(2)
    lifeline.cut()
    with pytest.raises(OSError, match=r"[Rr]efused"):
        hold(lifeline.end, 20.0, ended.set)


@pytest.mark.seconds
def test_a_stopped_controller_keeps_its_hosts_and_a_cut_or_a_kill_ends_them(tmp_path: Path) -> None:
    with hosts_on_one_machine("ctl", "h1", "h2", "h3") as net:
        controller = net.popen("ctl", [sys.executable, "-c", CONTROLLER, net.addresses["ctl"]])
        assert controller.stdout is not None
        ports = controller.stdout.readline().decode().split()
        agents = [
            net.popen(host, [sys.executable, "-c", AGENT, net.addresses["ctl"], port, seconds])
            for host, port, seconds in zip(("h1", "h2", "h3"), ports, ("8", "8", "3"), strict=True)
        ]
        for agent in agents:
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"held\n"
        net.signal("ctl", signal.SIGSTOP)
        net.cut("h1")
        start = time.monotonic()
        assert agents[0].communicate(timeout=10)[0] == b"ended\n"
        assert time.monotonic() - start < 5
        assert agents[2].communicate(timeout=10)[0] == b"held on\n"
        net.signal("ctl", signal.SIGKILL)
        assert agents[1].communicate(timeout=2)[0] == b"ended\n"
