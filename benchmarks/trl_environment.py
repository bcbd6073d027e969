"""A virtual environment for TRL, made once from requirements/trl.lock and kept in the user's cache."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import REPOSITORY
from rl.cache import cache_directory

_LOCK = REPOSITORY / "requirements" / "trl.lock"


def trl_python() -> Path:
    """The interpreter of an environment with exactly the lock's packages, which takes a minute or two to make.

    pip looks for packages, torch's CPU build among them, where its own configuration points. Raises CalledProcessError
    if it does not find them.
    """
    checksum = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:12]
    environment = cache_directory() / "environments" / f"trl-{checksum}"
    python, stamp = environment / "bin" / "python", environment / "complete"
    if not stamp.exists():
        print(f"installing {_LOCK.name} into {environment}, once", file=sys.stderr, flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "-r", _LOCK]
        subprocess.run(install, check=True)
        stamp.touch()
    return python
