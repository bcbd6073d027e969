"""Models on hosts: whether a host has the one that it is about to be given, and a copy for a host that has none.

A copy goes from the controller to the host over a connection of its own, which the host opens and proves with a token.
It appears in its place once it is whole.
"""

import hashlib
import hmac
import json
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ownloop_hosts.connections import family_of
from ownloop_hosts.files import removed_at_end
from rl.system.model_files import other_files

_SMALL_FILE = 1 << 20
_TOKEN_BYTES = 32
_BLOCK = 1 << 24
_STALLED_S = 60.0
TOKEN_S = 5.0  # others that connect do not keep the host waiting for longer


def model_files(model: Path) -> Mapping[str, str]:
    """The files of a model's directory: their sizes, and of small ones what is in them. Empty if there is none."""
    if not model.is_dir():
        return {}
    return {str(file): _print_of(model / file) for file in _all_files(model)}


def _all_files(path: Path) -> list[Path]:
    """Every file of the directory and the chat templates in their folder, relative to it: what makes it a copy."""
    files = {file.relative_to(path) for file in path.iterdir() if file.is_file()}
    return sorted(files | set(other_files(path)))


def check_same_model(model: Path, expected: Mapping[str, str]) -> None:
    """Raises ValueError unless this host has these files of a model."""
    found = model_files(model)
    if not found:
        raise ValueError(f"there is no model in {model}; copy it there, or keep models on a filesystem of all hosts")
    wrong = [name for name, content in expected.items() if found.get(name) != content]
    if wrong:
        raise ValueError(f"the model in {model} is another one than the controller's: {', '.join(wrong)} differ")


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """Where a host fetches a model."""

    model: Path
    """Where it is here, and will be there."""
    num_bytes: int
    address: str
    port: int
    token: bytes = field(repr=False)


class ModelServer:
    """Gives a model to one host, which `offer` is sent to."""

    def __init__(self, model: Path, address: str, token_s: float = TOKEN_S) -> None:
        """Listens at an address of this host, and serves in a thread until `close` is called or the model was sent.

        A client has `token_s` to send the token of the offer.
        """
        self._token_s = token_s
        self._model = model
        self._files = [(file, (model / file).stat().st_size) for file in _all_files(model)]
        self._server = socket.create_server((address, 0), family=family_of(address))
        num_bytes, port = sum(size for _, size in self._files), int(self._server.getsockname()[1])
        self.offer = ModelOffer(model, num_bytes, address, port, secrets.token_bytes(_TOKEN_BYTES))
        self.sent_bytes = 0
        threading.Thread(target=self._serve, name="model-copy", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._server.close()

    def _serve(self) -> None:
        try:
            with self._server:
                self._server.settimeout(_STALLED_S)
                while not self._send_to(self._server.accept()[0]):
                    pass
        except OSError:
            pass  # the host says what is wrong

    def _send_to(self, connection: socket.socket) -> bool:
        """Whether it was the host that the model is for."""
        with connection:
            if not self._knows_token(connection):
                return False
            connection.settimeout(_STALLED_S)
            table = [(str(file), size) for file, size in self._files]
            connection.sendall(json.dumps(table).encode() + b"\n")
            for path, size in self._files:
                with (self._model / path).open("rb") as file:
                    for start in range(0, size, _BLOCK):
                        self.sent_bytes += connection.sendfile(file, start, min(_BLOCK, size - start))
        return True

    def _knows_token(self, connection: socket.socket) -> bool:
        connection.settimeout(self._token_s)
        try:
            with connection.makefile("rb") as stream:
                return hmac.compare_digest(stream.read(_TOKEN_BYTES), self.offer.token)
        except OSError:
            return False


def receive_model(offer: ModelOffer) -> None:
    """Fetches a model to its place on this host. Raises ValueError if it has no room, or the copy was interrupted."""
    parent = offer.model.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(parent).free) < offer.num_bytes:
            raise ValueError(
                f"there is no model in {offer.model}, and no room for one: it takes {offer.num_bytes / 1e9:.1f} GB, "
                f"and {free / 1e9:.1f} GB are free"
            )
        with tempfile.TemporaryDirectory(dir=parent, prefix=".model-") as copy, removed_at_end(Path(copy)):
            whole = Path(copy) / "model"
            whole.mkdir()
            _receive(offer, whole)
            if not offer.model.is_dir():  # another host that shares this filesystem may have been faster
                whole.replace(offer.model)
    except OSError as error:
        raise ValueError(f"there is no model in {offer.model}, and none could be copied there: {error}") from None


def _receive(offer: ModelOffer, folder: Path) -> None:
    with socket.create_connection((offer.address, offer.port), timeout=_STALLED_S) as connection:
        connection.sendall(offer.token)
        with connection.makefile("rb", buffering=1 << 20) as stream:
            if not (table := stream.readline()):
                raise ConnectionError("the controller closed the connection")
            for name, size in json.loads(table):
                target = folder / name
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise ConnectionError(f"the controller sent {name!r}, which is outside the model")
                target.parent.mkdir(exist_ok=True)
                with target.open("wb") as file:
                    _copy(stream.read, file.write, size)


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], object], size: int) -> None:
    while size:
        data = read(min(size, _BLOCK))
        if not data:
            raise ConnectionError("the controller closed the connection")
        write(data)
        size -= len(data)


def _print_of(file: Path) -> str:
    size = file.stat().st_size
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if size <= _SMALL_FILE else f"{size} bytes"
