"""Whether the recipe in a run's folder is one that this user's runs wrote. `--resume` executes its source.

A run signs its `recipe.json` with a key that only this user can read. A folder may be moved or copied, and the
signature holds; a recipe that somebody else wrote or changed has none. The key is `ownloop/recipe.key` in
`$XDG_STATE_HOME`, by default `~/.local/state`.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.system.disk import to_json

_KEY_BYTES = 32
_FIELD = "signature"


def key_file() -> Path:
    """Where this user's key is kept."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "ownloop" / "recipe.key"


def signed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with a signature; without one where no key can be kept, so that resuming takes `--trust`."""
    try:
        key = _own_key(create=True)
    except OSError:
        key = None
    content = _content(recipe)
    return content if key is None else {**content, _FIELD: _signature(key, content)}


def is_own(recipe: Mapping[str, Any]) -> bool:
    """Whether a run of this user signed the recipe as it is. Raises ValueError if others may read or write the key."""
    key = _own_key(create=False)
    given = recipe.get(_FIELD)
    return key is not None and isinstance(given, str) and hmac.compare_digest(_signature(key, _content(recipe)), given)


def check_own(recipe: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError, saying what to do, unless this user's run wrote the recipe in `file`."""
    if not is_own(recipe):
        raise ValueError(
            f"{file} is not signed with {key_file()}: another user's run wrote it, somebody changed it, or the key is "
            'new. Resuming would execute its "source" as you. Read "source" and "options" in that file; if you want to '
            "run them, add --trust"
        )


def _content(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as it is in its file, without the signature."""
    return json.loads(json.dumps(to_json({name: value for name, value in recipe.items() if name != _FIELD})))


def _signature(key: bytes, content: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _own_key(*, create: bool) -> bytes | None:
    """This user's key; None if there is none and `create` is False. Raises OSError if it cannot be kept."""
    file = key_file()
    if create and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and linked: of two runs that begin at once, one makes the key and both read it.
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(partial)
        partial.unlink()
    if not file.exists():
        return None
    status = file.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{file} must belong to you and be closed to others; delete it, or: chmod 600 {file}")
    return file.read_bytes()
