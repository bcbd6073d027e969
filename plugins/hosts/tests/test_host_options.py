"""What `--hosts` says."""

import pytest

from controller.launching.hosts import Hosts, parse_hosts
from ownloop_hosts.host_groups import WorkerHosts
from ownloop_hosts.starting.ssh_hosts import SshHosts


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ("trainer=n1:700,n2 generator=n3", WorkerHosts({"trainer": ("n1:700", "n2"), "generator": ("n3",)})),
        (
            "ssh trainer=n1,me@n2 generator=n3 port=700 tls=no start_within_s=9",
            SshHosts({"trainer": ("n1", "me@n2"), "generator": ("n3",)}, port=700, tls=False, start_within_s=9.0),
        ),
        ("none", None),
        ("ssh trainer=n1 ssh=ssh|-J|gate", SshHosts({"trainer": ("n1",)}, ssh=("ssh", "-J", "gate"))),
    ],
)
def test_hosts(words: str, hosts: Hosts | None) -> None:
    assert parse_hosts([word.replace("|", " ") for word in words.split()]) == hosts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shh trainer=n1", r"--hosts 'shh' is neither ROLE=HOST:PORT nor a way to start workers; did you mean 'ssh'"),
        ("", "hosts names no role; write for example"),
        ("ssh", "--hosts ssh names no role"),
        ("ssh trainer=n1 prot=700", r"--hosts ssh 'prot' is no option; did you mean 'port'"),
        ("ssh trainer=n1 port=x", "--hosts ssh port is 'x', which is no number"),
        ("ssh trainer=n1 tls=false", "--hosts ssh tls is 'false'; write yes or no"),
        ("ssh trainer=n1 trainer=n2", "write each role and each option once"),
        ("ssh trainer=n1 port=65530", "address of a worker"),
    ],
)
def test_mistakes_are_named(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hosts(words.split())
