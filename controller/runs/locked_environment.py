"""Virtual environments of packages that do not go together with ours, made once and kept in the user's cache."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from rl.cache import cache_directory


def locked_python(lock: Path) -> Path:
    """The interpreter of an environment with exactly the packages of a lock file, such as `requirements/trl.lock`.

    Making it takes a minute or two. pip looks for packages, torch's CPU build among them, where its own configuration
    points. Raises CalledProcessError if it does not find them.
    """
    checksum = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    environment = cache_directory() / "environments" / f"{lock.stem}-{checksum}"
    python, stamp = environment / "bin" / "python", environment / "complete"
    if not stamp.exists():
        print(f"installing {lock.name} into {environment}, once", file=sys.stderr, flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "-r", lock]
        subprocess.run(install, check=True)
        stamp.touch()
    return python
