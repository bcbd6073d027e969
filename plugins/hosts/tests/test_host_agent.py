"""The agent's endpoints, called in the test's own process. Its processes are children of the test."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ownloop_hosts.host_agent import (
    CONTROLLER_VARIABLE,
    HostAgent,
    end_processes_of,
    hash_of,
    interface_of,
    network_variables,
    versions_here,
)
from tests.waiting import LIMIT_S, wait_for_line, wait_until

pytestmark = pytest.mark.seconds

SHOW_STACKS = "import faulthandler, sys, time; faulthandler.register(12, file=2, all_threads=True)"
RANK = f"{SHOW_STACKS}; print(flush=True); time.sleep(1000)"


@pytest.fixture
def ranks(tmp_path: Path) -> Generator[list[subprocess.Popen[bytes]]]:
    """Two processes of the controller "me", and one of another. They have begun to sleep, or are about to."""
    running: list[subprocess.Popen[bytes]] = []
    for index, controller in enumerate(("me", "me", "other")):
        with (tmp_path / f"{index}.log").open("wb") as log:
            env = {**os.environ, CONTROLLER_VARIABLE: controller}
            running.append(subprocess.Popen([sys.executable, "-c", RANK], env=env, stdout=subprocess.PIPE, stderr=log))
    for process in running:
        wait_for_line(process.stdout, "a rank that can show its stack")
    yield running
    for process in running:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def ask(agent: HostAgent, endpoint: str, *args: Any) -> Any:
    """The agent's answer, without Monarch."""
    method = getattr(HostAgent, endpoint)._method
    return asyncio.run(getattr(method, "__wrapped__", method)(agent, *args))  # Monarch wraps concurrent endpoints


def test_ranks_are_watched_shown_and_killed(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # on a host, ranks are the agent's siblings
    agent, logs = HostAgent("me", 20.0), [tmp_path / "0.log", tmp_path / "1.log"]
    ask(agent, "watch", "toy/1", [process.pid for process in ranks[:2]], logs)
    assert ask(agent, "beat", {}).meshes["toy/1"].gone == ()
    assert "line 1 in <module>" in ask(agent, "stacks", "toy/1", [0])[0]
    assert b"most recent call first" in ask(agent, "beat", {logs[0]: 0}).logs[logs[0]]
    size = logs[0].stat().st_size
    assert ask(agent, "beat", {logs[0]: size}).logs == {}
    ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: ask(agent, "beat", {}).meshes["toy/1"].stopped_s, "a sign of life that tells of a stopped rank")
    assert list(ask(agent, "beat", {}).meshes["toy/1"].stopped_s) == [1]
    ask(agent, "kill", "toy/1")
    ask(agent, "ended", "toy/1", LIMIT_S)
    assert [process.wait(LIMIT_S) for process in ranks[:2]] == [-signal.SIGKILL] * 2
    assert ranks[2].poll() is None
    assert ask(agent, "beat", {}).meshes == {}


def test_only_the_controllers_own_processes_are_ended(ranks: list[subprocess.Popen[bytes]]) -> None:
    end_processes_of("me")
    assert [process.wait(LIMIT_S) for process in ranks[:2]] == [-signal.SIGKILL] * 2
    assert ranks[2].poll() is None


def test_a_host_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    agent = HostAgent("me", 20.0)
    before = time.time()
    facts = ask(agent, "facts", "127.0.0.1")
    assert before <= facts.clock <= time.time()
    assert interface_of("127.0.0.1") == facts.network["GLOO_SOCKET_IFNAME"] == "lo"
    assert facts.network["NCCL_SOCKET_IFNAME"] == "ib0,ib1"  # its own
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert network_variables("eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"  # and not eth10
    assert network_variables("") == {}
    assert facts.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.log_folder.is_dir()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        with pytest.raises(ConnectionRefusedError):
            ask(HostAgent("me", 20.0), "hold", silent.getsockname())


def test_the_version_of_ownloop_tells_checkouts_apart(tmp_path: Path) -> None:
    assert hash_of([]) not in versions_here()["ownloop"]  # its files were found
    for name in ("one", "two"):
        (tmp_path / name / "rl").mkdir(parents=True)
        (tmp_path / name / "rl" / "module.py").write_text("value = 1\n")
    assert hash_of([tmp_path / "one" / "rl"]) == hash_of([tmp_path / "two" / "rl"])
    (tmp_path / "two" / "rl" / "module.py").write_text("value = 2\n")
    assert hash_of([tmp_path / "one" / "rl"]) != hash_of([tmp_path / "two" / "rl"])
