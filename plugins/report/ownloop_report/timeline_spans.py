"""Reads the spans of a run's `timeline.json`."""

import json
import os
from pathlib import Path
from typing import Any


def read_timeline(file: Path, max_bytes: int = 1 << 20) -> list[tuple[str, str, int, float, float]]:
    """(process, name, lane, begin, end) of the latest spans, in seconds since 1970, in the order in which they ended.

    Reads the last `max_bytes` of the file, which by default hold some 8000 spans. There are none without a file, or in
    a damaged one.
    """
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            tail = stream.read()
        events: list[dict[str, Any]] = json.loads(tail if start == 0 else b"[" + tail[tail.index(b"\n") :])
    except (OSError, ValueError):
        return []
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [
        (names[event["pid"]], event["name"], event["tid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X" and event["pid"] in names
    ]
