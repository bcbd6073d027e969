"""What users write for hosts, and what they get for mistakes."""

import socket

import pytest

from ownloop_hosts.connections import Address, listening, parse_address
from ownloop_hosts.host_groups import WorkerHosts, parse_groups
from plugins.hosts.tests.stand_ins import free_ports


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("n1:26600", Address("tls", "n1", 26600)),
        ("n1", Address("tls", "n1", 26600)),
        ("tls://n1.lab:700", Address("tls", "n1.lab", 700)),
        ("tcp://10.0.0.1:700", Address("tcp", "10.0.0.1", 700)),
        ("tcp://[fe80::1]:700", Address("tcp", "fe80::1", 700)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1:port", "address of a worker is 'n1:port'; write HOST:PORT"),
        ("n1:65530", "write HOST:PORT"),  # it needs ten ports
        ("", "write HOST:PORT"),
        ("http://n1:700", "scheme of a worker's address"),
    ],
)
def test_mistakes_in_addresses_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_address(text)


def test_ipv6_addresses_are_written_with_brackets() -> None:
    assert str(parse_address("tcp://[::1]:700")) == "tcp://[::1]:700"


def test_groups() -> None:
    hosts = parse_groups(["trainer=n1:700,n2", "generator=n3"])
    assert hosts == WorkerHosts({"trainer": ("n1:700", "n2"), "generator": ("n3",)})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["n1:700"], "--hosts 'n1:700': write each role once"),
        (["trainer=n1", "trainer=n2"], "write each role once"),
        (["trainer=n1,n1"], "name at least one, and each once"),
        (["trainer=n1", "generator=tcp://n2"], "use TLS on all of them, or on none"),
    ],
)
def test_mistakes_in_groups_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_groups(words)


def test_a_worker_is_found_on_any_of_its_ten_ports() -> None:
    port = free_ports(19) + 9
    with socket.create_server(("127.0.0.1", port)):
        for first in (port, port - 4, port - 9):
            assert listening(Address("tcp", "127.0.0.1", first)) == Address("tcp", "127.0.0.1", port)
    assert listening(Address("tcp", "127.0.0.1", port - 4)) is None
    with pytest.raises(ValueError, match=r"host 'no\.such\.host' has no address"):
        listening(Address("tcp", "no.such.host", port))
