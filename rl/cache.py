"""Where ownloop keeps on disk what it can fetch or measure again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$OWNLOOP_CACHE, else ownloop's folder in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("OWNLOOP_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "ownloop"
