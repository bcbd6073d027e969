"""Runs the steps of a Dockerfile without docker, in a fresh root of Debian's packages: `python requirements/image.py`.

    python requirements/image.py [DOCKERFILE] [--root DIR] [--bind DIR ...] [--arg NAME=VALUE ...]

It needs root, mmdebstrap and Debian's mirror. The base image is Debian's own Python in place of `python:3.12-slim`;
`COPY . .` copies what git tracks. Variables of pip, uv and certificates are passed on. Ends with the image's command.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = "ca-certificates,python3,python3-venv,python3-dev"  # what the base image has


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile and what follows each, on one line."""
    whole = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(str.strip, whole.splitlines()):
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def run(root: Path, folder: str, env: dict[str, str], binds: list[Path], command: list[str]) -> None:
    """Runs a command in the root, with processes and mounts of its own."""
    mounts = [f"mount --bind {shlex.quote(str(path))} {shlex.quote(f'{root}{path}')}" for path in binds]
    inside = ["chroot", str(root), "env", "--ignore-environment", *(f"{key}={value}" for key, value in env.items())]
    enter = shlex.join([*inside, "sh", "-c", f'cd {shlex.quote(folder)} && exec "$@"', "-", *command])
    words = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={root}/proc"]
    if subprocess.run([*words, "sh", "-ec", "\n".join([*mounts, f"exec {enter}"])], check=False).returncode:
        raise SystemExit(f"error: {shlex.join(command)} failed")


def build(dockerfile: Path, root: Path, binds: list[Path], arguments: dict[str, str]) -> None:
    """Makes the root and runs every step."""
    if not (root / "bin").exists():
        make = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
        subprocess.run(make, check=True)
    for path in binds:
        place = root / path.relative_to("/")
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    for name in ("etc/resolv.conf", "etc/hosts"):
        shutil.copy(f"/{name}", root / name)
    passed = {
        key: value for key, value in os.environ.items() if key.startswith(("PIP_", "UV_", "SSL_", "OWNLOOP_TORCH"))
    }
    env, folder = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", **passed}, "/"
    for word, rest in instructions(dockerfile.read_text()):
        print(f"{word} {rest}", flush=True)
        if word == "ARG":
            name, _, default = rest.partition("=")
            env[name] = arguments.get(name, default)
        elif word == "ENV":
            pairs = (each.partition("=") for each in shlex.split(rest))
            env |= {key: value.replace("$PATH", env["PATH"]) for key, _, value in pairs}
        elif word == "WORKDIR":
            folder = rest
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            _copy(root / folder.lstrip("/"), rest)
        elif word == "RUN":
            run(root, folder, env, binds, ["sh", "-c", rest])
        elif word == "CMD":
            run(root, folder, env, binds, re.findall(r'"([^"]*)"', rest))


def _copy(into: Path, rest: str) -> None:
    if rest.split() != [".", "."]:
        raise SystemExit(f"error: COPY {rest}: only `COPY . .` is known here")
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(into)], input=tracked, check=True)


def main() -> None:
    """Parses the options and builds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", nargs="?", type=Path, default=REPOSITORY / "Dockerfile")
    parser.add_argument("--root", type=Path, help="a folder to keep; by default a temporary one")
    parser.add_argument(
        "--bind", type=Path, nargs="*", default=[], help="files and folders of this machine that steps read"
    )
    parser.add_argument("--arg", nargs="*", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    arguments = dict(each.split("=", 1) for each in options.arg)
    with tempfile.TemporaryDirectory() as folder:
        build(options.dockerfile, options.root or Path(folder) / "root", options.bind, arguments)


if __name__ == "__main__":
    main()
