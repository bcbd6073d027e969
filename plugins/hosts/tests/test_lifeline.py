"""The connection by which an agent knows that its controller runs."""

import signal
import sys
import threading
from pathlib import Path

import pytest

from ownloop_hosts.connections import Lifeline, hold
from plugins.hosts.tests.namespaces import hosts_on_one_machine
from tests.waiting import LIMIT_S, wait_for_end, wait_for_line

CONTROLLER = """
import sys, time
from ownloop_hosts.connections import Lifeline
lifelines = [Lifeline(sys.argv[1]) for _ in range(4)]
print(*(lifeline.end[1] for lifeline in lifelines), flush=True)
time.sleep(1000)
"""
AGENT = """
import sys, threading
from ownloop_hosts.connections import hold
ended = threading.Event()
hold((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]), ended.set)
print("held", flush=True)
print("ended" if ended.wait(float(sys.argv[4])) else "held on", flush=True)
"""


def test_the_controller_gives_a_host_up() -> None:
    lifeline, ended = Lifeline("127.0.0.1"), threading.Event()
    hold(lifeline.end, 20.0, ended.set)
    assert not ended.wait(0.2)  # a busy machine can only hide a mistake here
    lifeline.cut()
    assert ended.wait(LIMIT_S), "the agent does not know that the controller gave its host up"
    lifeline.cut()
    with pytest.raises(OSError, match=r"[Rr]efused"):
        hold(lifeline.end, 20.0, ended.set)


@pytest.mark.seconds
def test_a_stopped_controller_keeps_its_hosts_a_cut_ends_them(tmp_path: Path) -> None:
    with hosts_on_one_machine("ctl", "h1", "h2", "h3") as net:
        controller = net.popen("ctl", [sys.executable, "-c", CONTROLLER, net.addresses["ctl"]])
        ports = wait_for_line(controller.stdout, "the ends of the lifelines").split()
        lost_after_s = 2.0
        cut, patient, kept, stopped = [
            net.popen(host, [sys.executable, "-c", AGENT, net.addresses["ctl"], port, str(limit_s), str(seconds)])
            for port, (host, limit_s, seconds) in zip(
                ports,
                (
                    ("h1", lost_after_s, 1000),
                    ("h1", 1000.0, 1000),
                    ("h2", lost_after_s, 1000),
                    ("h3", lost_after_s, 2 * lost_after_s),
                ),
                strict=True,
            )
        ]
        for agent in (cut, patient, kept, stopped):
            assert wait_for_line(agent.stdout, "an agent that holds its lifeline") == "held"
        net.signal("ctl", signal.SIGSTOP)
        net.cut("h1")
        assert wait_for_end(cut, "an agent whose host was cut off")[1] == "ended\n"
        assert patient.poll() is None  # its limit is longer, so the end above came by the limit
        assert wait_for_end(stopped, "an agent whose controller is stopped")[1] == "held on\n"
        assert kept.poll() is None
        net.signal("ctl", signal.SIGKILL)
        assert wait_for_end(kept, "an agent whose controller was killed")[1] == "ended\n"
