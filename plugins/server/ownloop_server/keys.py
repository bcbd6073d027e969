"""Keys of users, in a file of the server's folder that holds only their digests.

A key is 32 random bytes, so that a plain SHA-256 of it cannot be turned back. A running server notices when the file
changes. This module imports nothing that takes long, for `ownloop key`.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ownloop_server.config import ServeConfig, is_this_host

KEYS = "keys.json"
"""The file's name in the server's folder."""
_PREFIX = "tml-"  # the official SDK refuses any other
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who sends a request."""

    name: str
    """Empty on a server that asks for no keys."""
    is_operator: bool = False
    """Whether they see and manage everyone's runs."""


EVERYONE = User(name="", is_operator=True)
"""The user of every request to a server that asks for no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What the file holds of a key."""

    sha256: str
    operator: bool
    created: str


class Keys:
    """The keys of one server."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the server's. Without a file there are no keys."""
        self._file = folder / KEYS
        # the time and inode of the file that was read; a replaced file has others
        self._seen: tuple[int, int] | None = None
        self._users: dict[str, User] = {}

    def __len__(self) -> int:
        return len(self._read())

    def add(self, name: str, *, operator: bool = False) -> str:
        """Makes a key and returns it; it cannot be shown again. Raises ValueError if the name has one, or is none."""
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"name is {name!r}; it must start with a letter or a digit and have at most 64 letters, digits, dots, "
                "underscores, hyphens and @"
            )
        key = _PREFIX + secrets.token_urlsafe(32)  # 256 bits, so that a plain digest cannot be searched
        with self._changing() as entries:
            if name in entries:
                raise ValueError(f"{name!r} has a key; revoke it first")
            created = datetime.now(UTC).isoformat(timespec="seconds")
            entries[name] = _Entry(sha256=_digest(key), operator=operator, created=created)
        return key

    def revoke(self, name: str) -> None:
        """Makes a key useless. Raises ValueError if the name has none."""
        with self._changing() as entries:
            if name not in entries:
                raise ValueError(f"{name!r} has no key; users with one: {', '.join(entries) or 'none'}")
            del entries[name]

    def list(self) -> Mapping[str, str]:
        """Name -> a few words about the key."""
        entries = self._read()
        return {n: f"{'operator, ' if e.operator else ''}made {e.created}" for n, e in entries.items()}

    def exist(self) -> bool:
        """Whether somebody has a key. A change of the file counts at once."""
        return bool(self._by_digest())

    def find(self, key: str) -> User | None:
        """Whose key this is, or None. A change of the file counts at once."""
        # compares digests, so the time to find one says nothing about the key
        return self._by_digest().get(_digest(key))

    def _by_digest(self) -> Mapping[str, User]:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        if self._seen != (status.st_mtime_ns, status.st_ino):
            entries = self._read()
            self._users = {e.sha256: User(name=name, is_operator=e.operator) for name, e in entries.items()}
            self._seen = status.st_mtime_ns, status.st_ino
        return self._users

    def _read(self) -> dict[str, _Entry]:
        try:
            return {name: _Entry(**entry) for name, entry in json.loads(self._file.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._file} cannot be read: {error}; restore or delete it") from None

    @contextmanager
    def _changing(self) -> Generator[dict[str, _Entry]]:
        """What the file holds; changes are written when the block ends without an error."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two operators may change keys at once
            entries = self._read()
            yield entries
            partial = self._file.with_suffix(".partial")
            # readable by this user alone from its first byte
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({name: asdict(entry) for name, entry in entries.items()}, file, indent=2)
            partial.replace(self._file)  # readers see the old file or the new one


def needs_keys(config: ServeConfig, keys: Keys) -> bool:
    """Whether clients need a key: if one was made, or if other hosts reach the server.

    Raises ValueError if they do and there is none.
    """
    if len(keys) == 0 and not is_this_host(config.host):  # without a key, everyone who reaches it could train
        raise ValueError(
            f"ServeConfig.host is {config.host}, which other hosts reach, and no user has a key; make one for each "
            f"user: ownloop key add NAME --folder {config.folder}"
        )
    return len(keys) > 0


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
