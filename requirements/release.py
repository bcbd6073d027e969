"""Makes a release of a version and tags it: `make release VERSION=0.2.0`. Nothing is uploaded.

All of it happens in a clone: versions and dates are written there, sdists and wheels of the core and of every plug-in
are built, twine checks them, they are installed in an environment that is new, and two steps of the main recipe run
from there. Only then the checkout gets the commit, the tag and `dist/`.
"""

import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TWINE = ROOT / ".venv-release" / "bin" / "twine"
_VERSION = r"\d+\.\d+\.\d+((a|b|rc)\d+)?"


def check(root: Path, version: str) -> None:
    """Raises ValueError for what keeps a checkout from being released."""
    if not re.fullmatch(_VERSION, version):
        raise ValueError(f"VERSION is {version!r}; it must be like 0.2.0 or 0.2.0rc1")
    if changed := _git(root, "status", "--porcelain"):
        raise ValueError(f"the checkout has changes that are not committed, such as {changed.splitlines()[0].strip()}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise ValueError(f"the tag v{version} exists; a release needs a new version")
    if not _changes(root, version):
        raise ValueError(f"CHANGELOG.md has no section '## {version}, unreleased' that says what is new")


def _changes(root: Path, version: str) -> str:
    """What the changelog says of a version that is to come."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}, unreleased\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def write_version(root: Path, version: str, day: datetime.date) -> None:
    """Writes the version into every pyproject.toml and the citation, and the day into the changelog."""
    for path in (root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))):
        text = re.sub(rf'^version = "{_VERSION}"$', f'version = "{version}"', path.read_text(), flags=re.MULTILINE)
        path.write_text(re.sub(rf"\b(ownloop(-\w+)?(\[\w+\])?==){_VERSION}", rf"\g<1>{version}", text))
    citation = root / "CITATION.cff"
    lines = [line for line in citation.read_text().splitlines() if not line.startswith("date-released:")]
    lines = [f"version: {version}\ndate-released: {day}" if line.startswith("version:") else line for line in lines]
    citation.write_text("\n".join(lines) + "\n")
    changelog = root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## {version}, unreleased", f"## {version}, {day}"))


def build(root: Path) -> list[Path]:
    """Builds an sdist and a wheel of the core and of each plug-in into `dist/`, with the checkout's environment."""
    for folder in (root, *(path.parent for path in sorted(root.glob("plugins/*/pyproject.toml")))):
        _run(folder, root / ".venv/bin/python", "-m", "hatchling", "build", "-d", root / "dist")
    return sorted((root / "dist").iterdir())


def install_and_train(root: Path, wheels: Sequence[Path]) -> None:
    """Puts the wheels in place of the checkout's own packages, and trains two steps in another folder."""
    names = ["ownloop", *(f"ownloop-{path.parent.name}" for path in root.glob("plugins/*/pyproject.toml"))]
    uv = root / ".venv/bin/uv"
    _run(root, uv, "pip", "uninstall", "--python", root / ".venv/bin/python", *names)
    _run(root, uv, "pip", "install", "--python", root / ".venv/bin/python", "--no-deps", *wheels)
    with tempfile.TemporaryDirectory() as elsewhere:
        ownloop = root / ".venv/bin/ownloop"
        _run(Path(elsewhere), ownloop, "list", "--plugins")
        _run(Path(elsewhere), ownloop, "run", "grpo_smollm2_cpu", "--num-steps", "2", "--num-eval", "8")


def release(root: Path, version: str) -> None:
    """See the head of this file. Raises ValueError, or CalledProcessError for a step that fails."""
    check(root, version)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "ownloop"
        _run(root, "git", "clone", "--quiet", "--shared", root, clone)
        _run(clone, "make", "setup")
        write_version(clone, version, datetime.datetime.now(datetime.UTC).date())
        files = build(clone)
        _run(clone, TWINE, "check", "--strict", *files)
        install_and_train(clone, [file for file in files if file.suffix == ".whl"])
        identity = {key: _git(root, "config", key) for key in ("user.name", "user.email")}
        settings = [word for key, value in identity.items() if value for word in ("-c", f"{key}={value}")]
        _run(clone, "git", *settings, "commit", "--quiet", "--all", "--message", f"Version {version}")
        _run(clone, "git", *settings, "tag", "--annotate", f"v{version}", "--message", f"ownloop {version}")
        _run(root, "git", "pull", "--quiet", "--ff-only", clone, f"refs/tags/v{version}:refs/tags/v{version}")
        shutil.rmtree(root / "dist", ignore_errors=True)
        shutil.copytree(clone / "dist", root / "dist")
    print(f"v{version} is tagged, and dist/ has {len(files)} files; nothing was uploaded")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _run(folder: Path, *words: "str | Path") -> None:
    print("+", *(word.name if isinstance(word, Path) else word for word in words), flush=True)
    subprocess.run([str(word) for word in words], cwd=folder, check=True)


if __name__ == "__main__":
    try:
        release(ROOT, sys.argv[1])
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
