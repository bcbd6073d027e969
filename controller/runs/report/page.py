"""Writes a run's `report.html`: one file that needs nothing else, so that it opens from a disk and can be sent."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from controller.runs.report.contents import report_contents
from controller.runs.report.samples import Decode
from rl.system.files import to_json, write_whole

REPORT = "report.html"
_PLACE = "/*DATA*/"


def write_report(
    run: Path, decode: Decode | None = None, command: str = "", file: Path | None = None, *, state: str | None = None
) -> Path:
    """Writes the report of the run in this folder, which may still be going on, and returns its path.

    `decode` turns the model's tokens into text; without it, answers are not cut into tokens. `state` replaces what the
    folder says. Raises `RecordingError`.
    """
    file, contents = file or run / REPORT, report_contents(run, decode, command)
    write_whole(file, page(contents if state is None else {**contents, "state": state}).encode())
    return file


def page(contents: dict[str, Any]) -> str:
    """The page that shows these contents."""
    template = files("controller.runs.report").joinpath("page.html").read_text(encoding="utf-8")
    # Answers may hold "</script>" and "<!--", which would end the element or change how it is read.
    text = json.dumps(to_json(contents), allow_nan=False).replace("<", "\\u003c")
    return template.replace(_PLACE, text, 1)
