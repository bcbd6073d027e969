"""A plug-in that a test makes up: the files of an installed distribution, in a folder that goes on Python's path."""

from collections.abc import Mapping
from pathlib import Path


def write_plugin(folder: Path, entries: Mapping[str, str], *, name: str = "mine", **modules: str) -> None:
    """Writes a distribution of version 1.0. `entries` are `KIND.NAME` -> "module:attribute"; `modules` have sources."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines: list[str] = []
    for entry, value in entries.items():
        kind, _, short = entry.partition(".")
        lines.append(f"[ownloop.{kind}]\n{short} = {value}\n")
    (info / "entry_points.txt").write_text("".join(lines))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
