"""What a run recorded, as a reader without our code sees it, and a disk that has no room for more."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def recorded_rows(run: Path) -> list[dict[str, Any]]:
    """Every row of every file in a run's folder `rollouts`, evaluations first, then by step."""
    return [row for file in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@contextmanager
def disk_of(num_bytes: int) -> Generator[None]:
    """No file of this process may grow beyond this size, as if the disk were full: the kernel says EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
