"""Files of JSON lines: whole lines are added at the end, whatever happens."""

import json
import os
from pathlib import Path
from typing import Any

from rl.runs.recording import RecordingError, sync_directory

_BLOCK = 1 << 16


def append_line(file: Path, row: Any) -> None:
    """Writes a value in JSON types as one line, at once. Raises `RecordingError`, with the file as it was before."""
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    length: int | None = None
    try:
        with file.open("ab", buffering=0) as stream:
            length = stream.seek(0, os.SEEK_END)
            if (written := stream.write(line)) < len(line):  # only the next write says why
                stream.write(line[written:])
    except OSError as error:
        if length is not None:
            os.truncate(file, length)
        raise RecordingError(file, error) from error


def sync_file(file: Path) -> None:
    """Makes sure that every line is on the disk. Raises `RecordingError`."""
    try:
        with file.open("ab") as stream:
            os.fsync(stream.fileno())
        sync_directory(file.parent)
    except OSError as error:
        raise RecordingError(file, error) from error


def drop_unfinished_line(file: Path) -> None:
    """Cuts off everything after the last newline. Reads no more of the file than that."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            if newline >= 0:
                stream.truncate(start + newline + 1)
                return
            end = start
        stream.truncate(0)
