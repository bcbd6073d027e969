"""`recipe.json` in a run's folder: the recipe's source and its options, signed, from which the run can be resumed.

Resuming executes the source. A run signs the file with a key that only this user can read: `ownloop/recipe.key` in
`$XDG_STATE_HOME`, by default `~/.local/state`. A folder may be moved or copied, and the signature holds; a recipe that
somebody else wrote or changed has none.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from controller.commands.recipes import recipe_files
from controller.runs.folder import CONFIG_FILE, complete_checkpoints, read_json, to_json, write_json
from controller.runs.metric_rows import SCHEMA_VERSION, check_schema
from rl.system.secret_fields import hidden_fields, hide_in_options

RECIPE_FILE = "recipe.json"
_KEY_BYTES = 32
_FIELD = "signature"


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run given by path or by its name within `runs`. Raises ValueError if there is no such run."""
    for path in (Path(name), runs / name):
        if (path / CONFIG_FILE).is_file():
            return path
    raise ValueError(f"there is no run {name}: neither {Path(name)} nor {runs / name} holds a {CONFIG_FILE}")


def save_recipe(folder: Path, file: Path, options: Sequence[str], recording: Path | None = None, **more: Any) -> None:
    """Saves the origin of a run's configuration: the recipe's source, its options, its recording, and more."""
    recipe = {
        "schema_version": SCHEMA_VERSION,
        "file": file.absolute(),
        "options": [options],
        "replay": recording,
        **more,
        "source": decode_source(file.read_bytes()),
    }
    write_json(folder / RECIPE_FILE, signed(recipe), private=True)  # source and options may hold secrets


def add_options(folder: Path, options: Sequence[str], *, trust: bool = False) -> None:
    """Appends the options that a run was resumed with to the saved ones. `trust` makes the recipe this user's own."""
    recipe = saved_recipe(folder)
    if options or trust:
        added = {**recipe, "options": [*recipe["options"], *([options] if options else [])]}
        write_json(folder / RECIPE_FILE, signed(added) if trust or is_own(recipe) else added, private=True)


def saved_recipe(folder: Path) -> dict[str, Any]:
    """What `save_recipe` wrote. Raises ValueError for a folder without it or of another schema version."""
    file = folder / RECIPE_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {RECIPE_FILE}: it was not started by `ownloop run`; the script that started it "
            "continues it with RunFolder(path, config, resume=True)"
        )
    recipe: dict[str, Any] = read_json(file)
    check_schema(recipe, folder)
    return recipe


def how_to_go_on(folder: Path) -> str:
    """One line for the user. `folder` is a run that `ownloop run` started."""
    if complete_checkpoints(folder / "checkpoints"):
        return f"to continue: {shlex.join(['ownloop', 'run', '--resume', str(folder)])}"
    return f"there is no checkpoint to continue from; to start again: {command_of(folder)}"


def check_has_checkpoint(folder: Path) -> None:
    """Raises ValueError, naming the command to start again, for a run without a complete checkpoint."""
    if not complete_checkpoints(folder / "checkpoints"):
        raise ValueError(
            f"{folder} has no checkpoint to continue from; its content stays as it is. Start a new run: "
            f"{command_of(folder)}"
        )


def command_of(folder: Path) -> str:
    """The command that starts a run with the same recipe and options, in a folder of its own; secrets are hidden."""
    recipe = saved_recipe(folder)
    file = Path(recipe["file"])
    name = file.stem if recipe_files().get(file.stem) == file else str(file)
    hidden = hidden_fields(read_json(folder / CONFIG_FILE))
    options = [option for options in recipe["options"] for option in hide_in_options(options, hidden)]
    replay = ["--replay", str(recipe["replay"])] if recipe.get("replay") else []
    return shlex.join(["ownloop", "run", name, *replay, *options])


def key_file() -> Path:
    """Where this user's key is kept."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "ownloop" / "recipe.key"


def signed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with a signature; without one where no key can be kept, so that resuming takes `--trust`."""
    try:
        key = _own_key(create=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
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
