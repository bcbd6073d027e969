"""Certificates for mutual TLS between a few hosts: a small authority of one's own, and a check of what a host has.

    lab/ca.pem, ca.key                the authority; ca.key lets further hosts in
    lab/<host>/ca.pem, cert.pem, key.pem   what that host needs, and nothing else

Every certificate of an authority has all rights: its owner can run programs on every worker of that authority.
"""

import datetime
import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ownloop_hosts.connections import own_address_towards

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca.key", "cert.pem", "key.pem"
_VALID = datetime.timedelta(days=825)  # the longest that TLS libraries accept everywhere


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str], below: str = "") -> list[Path]:
    """Makes a certificate for each host, and the authority if the folder has none. Returns the hosts' folders.

    A host is its names and addresses with commas between them; the first is its folder's name, in the folder `below`
    if that is given. An address that the first name has on this host is added. Raises ValueError for a host that has a
    certificate already.
    """
    names = [[name.strip() for name in host.split(",") if name.strip()] for host in hosts]
    for own in names:
        if not own or (folder / below / own[0] / CERTIFICATE).exists():
            raise ValueError(
                f"{folder / below / ''.join(own[:1])} exists; remove it first if that host needs a new certificate"
            )
    authority = _authority(folder)
    made: list[Path] = []
    for own in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _host_certificate(authority, key, own)
        target = folder / below / own[0]
        target.mkdir(parents=True, exist_ok=True)
        (target / CA).write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
        (target / CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(target / KEY, key)
        made.append(target)
    return made


def own_certificates(folder: Path, name: str | None = None, now: datetime.datetime | None = None) -> Path:
    """The folder with this host's certificate: `folder`, or the one in it with the host's name.

    Raises ValueError, saying what to do, unless it holds a certificate for `name` (None: any name) that is valid `now`
    (None: at this moment).
    """
    own = next(
        (each for each in (folder, folder / (name or socket.gethostname())) if (each / CERTIFICATE).exists()), None
    )
    if own is None:
        raise ValueError(
            f"there is no certificate in {folder} or {folder / (name or socket.gethostname())}. Make one with "
            "`ownloop certs HOST ...` and copy the host's folder here, or name its place with --certs or OWNLOOP_CERTS"
        )
    for file in (CA, KEY):
        if not (own / file).exists():
            raise ValueError(f"{own} has no {file}; copy the whole folder that `ownloop certs` made for this host")
    certificate = x509.load_pem_x509_certificate((own / CERTIFICATE).read_bytes())
    if certificate.not_valid_after_utc < (now or datetime.datetime.now(datetime.UTC)):
        raise ValueError(
            f"the certificate in {own} ended on {certificate.not_valid_after_utc:%Y-%m-%d}; make a new one"
        )
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((own / CA).read_bytes()))
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"the certificate in {own} is not of the authority in its {CA}") from None
    if name is not None and name not in (named := names_of(certificate)):
        raise ValueError(
            f"the certificate in {own} is for {', '.join(named)}, not for {name}, as others call this host"
        )
    return own


def own_name(own: Path, other: str) -> str:
    """What the host `other` calls this host: the first name that the certificate in `own` is for.

    Without names, it is the address that the other host sees, if the certificate has it.
    """
    names = names_of(x509.load_pem_x509_certificate((own / CERTIFICATE).read_bytes()))
    if not all(map(_is_address, names)):
        return names[0]
    return address if (address := own_address_towards(other)) in names else names[0]


def names_of(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses that a certificate is for."""
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = extension.get_values_for_type(x509.IPAddress)
    return [*extension.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _authority(folder: Path) -> Authority:
    if (folder / CA_KEY).exists():
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return Authority(x509.load_pem_x509_certificate((folder / CA).read_bytes()), key)
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ownloop")])
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / CA).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / CA_KEY, key)
    return Authority(certificate, key)


def _host_certificate(authority: Authority, key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> x509.Certificate:
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _builder(subject, authority.certificate.subject, key)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + _VALID)
    )


def _general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    try:
        known = {str(each[4][0]) for each in socket.getaddrinfo(names[0], None, type=socket.SOCK_STREAM)}
    except OSError:  # the name means something only where the host is
        known = set[str]()
    for name in dict.fromkeys([*names, *sorted(known)]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    file.touch(mode=0o600)
    pem = serialization.PrivateFormat.PKCS8
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption()))


def packed(own: Path) -> bytes:
    """The files of a certificate's folder, for `ownloop worker --certs -`."""
    return json.dumps({name: (own / name).read_text() for name in (CA, CERTIFICATE, KEY)}).encode()


def unpack(data: bytes, folder: Path) -> None:
    """Writes what `packed` returned into a folder. Raises ValueError if it is something else."""
    try:
        files = json.loads(data)
        texts = {name: str(files[name]) for name in (CA, CERTIFICATE, KEY)}
    except (ValueError, KeyError, TypeError):
        raise ValueError("--certs - reads the certificates that a controller sends on standard input") from None
    for name, text in texts.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
