"""Workers that a run starts over ssh: where they listen, how they end, and what is said of hosts that fail."""

import asyncio
import contextlib
import re
import signal
from pathlib import Path

import psutil
import pytest

from ownloop_hosts.connections import accepts
from ownloop_hosts.starting.ssh_hosts import SshHosts
from plugins.hosts.tests.stand_ins import SSH, free_ports, install, running
from tests.waiting import LIMIT_S, has_ended, until

HERE = "127.0.0.1"


def workers_here() -> list[psutil.Process]:
    """The processes `ownloop worker` that this test has started."""
    found: list[psutil.Process] = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            if not has_ended(each) and "--lifeline" in each.cmdline():
                found.append(each)
    return found


@pytest.mark.seconds
def test_a_worker_over_ssh_starts_again_and_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ssh=SSH)
    told: list[str] = []
    groups, env = {"trainer": (f"me@{HERE}",), "generator": (f"me@{HERE}",)}, {"GREETING": "a b"}
    hosts = SshHosts(groups, env=env, port=free_ports())
    assert hosts.uses_tls
    assert hosts.certs is not None

    async def run() -> None:
        allocation = hosts.allocation(told.append)
        try:
            first = await allocation.workers()
            at = first["trainer"][0]
            assert at.scheme == "tls"
            assert first == {"trainer": (at,), "generator": (at,)}  # a host of two roles has one worker
            assert await allocation.workers() == first  # nothing is started twice
            (worker,) = workers_here()
            assert worker.environ()["GREETING"] == "a b"
            assert worker.cwd() == str(Path.cwd())
            worker.send_signal(signal.SIGKILL)
            again = at
            async with asyncio.timeout(LIMIT_S):
                while len(told) < 2:  # until its ssh has ended, too
                    (again,) = (await allocation.workers())["generator"]
                    await asyncio.sleep(0.02)
            assert again.port != at.port  # a controller that knew the old port cannot come back to it
            assert accepts(again, 1.0)
        finally:
            await allocation.stop()
        await until(lambda: not workers_here() and not accepts(again, 1.0), "the end of the worker")

    asyncio.run(run())
    assert told == [f"starting workers over ssh on me@{HERE}"] * 2
    assert "BatchMode=yes" in (tmp_path / "ssh-options").read_text()


def test_every_host_that_fails_is_named_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ssh=SSH)
    hosts = SshHosts({"trainer": ("127.0.0.2", "127.0.0.3", "no.such.host"), "critic": (HERE,)}, python="/no/python")
    with pytest.raises(ValueError, match="no worker could be started there") as raised:
        asyncio.run(hosts.allocation(lambda _: None).workers())
    message = str(raised.value)
    assert "127.0.0.2: no worker could be started there: ssh ended with status 255" in message
    assert "127.0.0.2: Permission denied (publickey)." in message
    assert "ssh: connect to host 127.0.0.3 port 22: No route to host" in message
    assert "no.such.host: host 'no.such.host' has no address" in message
    assert re.search(r"127\.0\.0\.1: .* status 127. The last lines of ssh:\n.*/no/python.*No such file", message)


def test_a_worker_that_does_not_start_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ssh="exec sleep 1000")
    with pytest.raises(ValueError, match=r"127\.0\.0\.1: no worker has begun to listen in time"):
        asyncio.run(SshHosts({"trainer": (HERE,)}, start_within_s=0.1).allocation(lambda _: None).workers())
    assert not running(tmp_path)


def test_ports_that_are_taken_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ssh="echo 'error: none of the ports 700 to 709 of n1 is free' >&2; exit 2")
    with pytest.raises(ValueError, match="none of the ports 700 to 709 of n1 is free"):
        asyncio.run(SshHosts({"trainer": (HERE,)}, tls=False).allocation(lambda _: None).workers())


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (("-oProxyCommand=x",), r"a host of 'trainer' is '-oProxyCommand=x'; write HOST or USER@HOST"),
        (("n1:26600",), r"write HOST or USER@HOST"),
        ((), "name at least one"),
        (("n1", "n1"), "and each once"),
    ],
)
def test_mistakes_in_hosts_are_named(hosts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SshHosts({"trainer": hosts})


def test_a_missing_ssh_is_named() -> None:
    hosts = SshHosts({"trainer": (HERE,)}, ssh=("no-such-ssh", "-4"))
    with pytest.raises(ValueError, match="ssh is 'no-such-ssh', which is no program here"):
        asyncio.run(hosts.allocation(lambda _: None).workers())
