"""Certificates: what `ownloop certs` makes is what TLS accepts, and mistakes with them are named before a start."""

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest

from controller.commands.cli import main
from ownloop_hosts.certificates import make_certificates, own_certificates, own_name
from tests.waiting import LIMIT_S, join


def handshake(server: Path, client: Path, name: str) -> None:
    """One TLS connection in which both ends ask for a certificate. Raises OSError if either refuses."""
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, own in ((ours, server), (theirs, client)):
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
        context.load_verify_locations(own / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)

        def serve() -> None:
            with listener.accept()[0] as connection:
                try:
                    with ours.wrap_socket(connection, server_side=True) as wrapped:
                        wrapped.sendall(b"x")
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=LIMIT_S) as raw,
                theirs.wrap_socket(raw, server_hostname=name) as connection,
            ):
                if connection.recv(1) != b"x":
                    raise OSError("refused")
        finally:
            join(thread)


def test_hosts_of_one_authority_trust_each_other_and_nobody_else(tmp_path: Path) -> None:
    n1, n2 = make_certificates(tmp_path / "lab", ["n1,10.0.0.1", "n2"])
    (n3,) = make_certificates(tmp_path / "lab", ["n3"])  # one more, of the same authority
    (stranger,) = make_certificates(tmp_path / "other", ["n2"])
    for client in (n2, n3):
        handshake(n1, client, "n1")
        handshake(n1, client, "10.0.0.1")
    with pytest.raises(OSError, match=r"refused|certificate|alert|reset"):
        handshake(n1, stranger, "n1")
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'n9'"):
        handshake(n1, n2, "n9")
    assert (n1 / "key.pem").stat().st_mode & 0o077 == 0
    assert (tmp_path / "lab" / "ca.key").stat().st_mode & 0o077 == 0
    assert not (n1 / "ca.key").exists()


def test_a_host_finds_its_own_certificate_and_mistakes_are_named(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    n1, _ = make_certificates(lab, ["n1,10.0.0.1", "n2"])
    assert own_certificates(lab, "n1") == own_certificates(n1, "n1") == n1
    assert own_certificates(n1, "10.0.0.1") == n1
    assert own_name(n1, "n2") == "n1"
    with pytest.raises(ValueError, match=r"is for n1, 10\.0\.0\.1, not for n2"):
        own_certificates(n1, "n2")
    with pytest.raises(ValueError, match=r"no certificate in .*ownloop certs HOST"):
        own_certificates(tmp_path, "n1")
    with pytest.raises(ValueError, match="exists; remove it first"):
        make_certificates(lab, ["n1"])
    make_certificates(tmp_path / "other", ["n1"])
    (n1 / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(ValueError, match="is not of the authority"):
        own_certificates(n1)
    (lab / "n2" / "key.pem").unlink()
    with pytest.raises(ValueError, match=r"has no key\.pem"):
        own_certificates(lab / "n2")


def test_a_certificate_is_valid_for_825_days(tmp_path: Path) -> None:
    (n1,) = make_certificates(tmp_path, ["n1"])
    now = datetime.datetime.now(datetime.UTC)
    assert own_certificates(n1, now=now + datetime.timedelta(days=824)) == n1
    with pytest.raises(ValueError, match="ended on"):
        own_certificates(n1, now=now + datetime.timedelta(days=826))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--listen", "tcp://{own}:26600"), "which has no TLS: any process that reaches it can run programs here"),
        (("--listen", "{own}:26600", "--insecure"), "--insecure is for tcp:// addresses"),
        (("--listen", "{own}:26600", "--certs", "nowhere"), "there is no certificate in"),
        (("--listen", "192.0.2.1:26600"), "whose address 192.0.2.1 is none of this host's"),
        (("--listen", "no.such.host:26600"), "host 'no.such.host' has no address"),
    ],
)
def test_a_worker_refuses_before_it_listens(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [_Interface("198.51.100.7")]})
    with pytest.raises(SystemExit) as end:
        main(["worker", *(argument.format(own="198.51.100.7") for argument in arguments)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


class _Interface:
    """What psutil says of an interface."""

    def __init__(self, address: str) -> None:
        """It has one address."""
        self.address = address
