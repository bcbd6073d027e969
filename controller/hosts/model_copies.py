"""Checks that a host can run what it is about to be given. They run on that host, in its agent."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

_SMALL_FILE = 1 << 20


def model_files(model: Path) -> Mapping[str, str]:
    """The files of a model's directory: their sizes, and of small ones what is in them. Empty if there is none."""
    if not model.is_dir():
        return {}
    return {file.name: _print_of(file) for file in sorted(model.iterdir()) if file.is_file()}


def check_same_model(model: Path, expected: Mapping[str, str]) -> None:
    """Raises ValueError unless this host has these files of a model."""
    found = model_files(model)
    if not found:
        raise ValueError(f"there is no model in {model}; copy it there, or keep models on a filesystem of all hosts")
    wrong = [name for name, content in expected.items() if found.get(name) != content]
    if wrong:
        raise ValueError(f"the model in {model} is another one than the controller's: {', '.join(wrong)} differ")


def _print_of(file: Path) -> str:
    size = file.stat().st_size
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if size <= _SMALL_FILE else f"{size} bytes"
