"""Certificates for the workers that a run starts itself: an authority that this process makes, for nobody else.

The folder is in memory. It is removed when the process ends, and the authority's key with it. What a killed process
left is removed by the next one.
"""

import functools
import ipaddress
import json
from pathlib import Path

from controller.hosts.addresses import is_loopback
from controller.hosts.certificates import CA, CERTIFICATE, KEY, make_certificates
from rl.owned_folder import OwnedFolder

_FILES = (CA, CERTIFICATE, KEY)


class WithRunCertificates:
    """Hosts on which the run starts the workers, so their certificates are made for it."""

    __slots__ = ()

    tls: bool

    @property
    def certs(self) -> Path | None:
        """The folder of the controller's certificate; None without TLS."""
        return controller_certificates() if self.tls else None

    @property
    def uses_tls(self) -> bool:
        """Whether the workers have TLS."""
        return self.tls


def controller_certificates() -> Path:
    """The folder with the certificate of this process. It is for every address of this host."""
    import psutil

    found = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    own = sorted(filter(_is_usable, found), key=lambda ip: (is_loopback(ip), ip))
    return _made(",".join(own), "controller")


def worker_certificates(host: str) -> Path:
    """The folder with the certificate of a worker on this host, as the controller calls it."""
    return _made(host, "workers")


def packed(own: Path) -> bytes:
    """The files of a certificate's folder, for `ownloop worker --certs -`."""
    return json.dumps({name: (own / name).read_text() for name in _FILES}).encode()


def unpack(data: bytes, folder: Path) -> None:
    """Writes what `packed` returned into a folder. Raises ValueError if it is something else."""
    try:
        files = json.loads(data)
        texts = {name: str(files[name]) for name in _FILES}
    except (ValueError, KeyError, TypeError):
        raise ValueError("--certs - reads the certificates that a controller sends on standard input") from None
    for name, text in texts.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)


@functools.cache
def _folder() -> OwnedFolder:
    return OwnedFolder("ownloop-certs-", in_memory=True)


@functools.cache
def _made(names: str, kind: str) -> Path:
    (own,) = make_certificates(_folder().path, [names], below=kind)
    return own


def _is_usable(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_link_local
    except ValueError:  # a MAC address, or an IPv6 address of one interface
        return False
