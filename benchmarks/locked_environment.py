"""Virtual environments of packages that do not go together with ours, made once and kept in the user's cache."""

import hashlib
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rl.system.disk import cache_directory


def locked_python(lock: Path) -> Path:
    """The interpreter of an environment with exactly the packages of a lock file, such as `requirements/trl.lock`.

    Making it takes a minute or two. pip takes the packages from the index that its configuration names. Raises
    CalledProcessError if one is missing there.
    """
    pins = with_own_torch(lock, version("torch"))  # torch must fit this machine
    checksum = hashlib.sha256(pins.encode()).hexdigest()[:12]  # another lock makes another environment
    environment = cache_directory() / "environments" / f"{lock.stem}-{checksum}"
    python, stamp = environment / "bin" / "python", environment / "complete"
    if not stamp.exists():
        print(f"installing {lock.name} into {environment}, once", file=sys.stderr, flush=True)
        shutil.rmtree(environment, ignore_errors=True)  # of an installation that was interrupted
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (environment / "pins.txt").write_text(pins)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
        subprocess.run([*install, "-r", environment / "pins.txt"], check=True)
        stamp.touch()  # last: it says that all is there
    return python


def with_own_torch(lock: Path, torch: str) -> str:
    """The lock's text. Where our own torch is no CPU build, the lock `torch-cuda.lock` takes the place of its torch."""
    text = lock.read_text()
    if torch.endswith("+cpu"):
        return text
    others = [line for line in text.splitlines() if not line.startswith("torch==")]
    return "\n".join([*others, lock.with_name("torch-cuda.lock").read_text()])
