"""The page of a run: what it holds, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rl.runs.folder import RunFolder, to_json
from rl.runs.report.contents import report_contents
from rl.runs.report.page import write_report
from tests.rl.runs.report.reported_runs import NASTY, reported_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class _Page(HTMLParser):
    """What a parser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def _decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def test_the_page_is_one_file_that_holds_the_run(tmp_path: Path) -> None:
    folder = reported_run(tmp_path / "a")
    run = folder.path
    text = write_report(run, _decode, "ownloop run mine").read_text()
    page = _Page(text)
    assert page.links == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.tags.count("script") == 2, "an answer cannot end the script"
    held, shown = json.loads(page.scripts[0]), to_json(report_contents(run, _decode, "ownloop run mine"))
    assert {**held, "written": 0} == {**json.loads(json.dumps(shown)), "written": 0}
    assert held["state"] == "running"
    assert held["evaluations"][1]["answers"][0]["text"] == NASTY


def test_what_a_report_holds(tmp_path: Path) -> None:
    folder = reported_run(tmp_path / "a")
    run = folder.path
    contents = report_contents(run, _decode)
    curves = {curve["label"]: curve for curve in contents["curves"]}
    assert curves["reward"]["held_out"] == [[0, 0.0, -0.1, 0.1], [10, 0.25, 0.15, 0.35], [20, 0.5, 0.4, 0.6]]
    assert curves["reward"]["points"][-1] == [20, 1.0]
    assert curves["loss"]["held_out"] == []
    phases = contents["phases"]
    assert [values[-1] for values in phases["series"].values()] == [1.5, 0.5, 1.0]
    assert [*phases["series"]] == ["generate", "push", "other"]
    assert [curve["label"] for curve in contents["memory"]] == ["forward"]
    assert contents["timeline"]["processes"] == ["controller", "trainer"]
    (first, _) = contents["evaluations"]
    assert [answer["step"] for answer in first["answers"]] == [0, 10, 20]
    assert first["answers"][1]["tokens"][:2] == [("e", -1.0), ("v", -1.0)]
    sample = contents["mismatch"][0]
    assert sample == {"step": 20, "tokens": [("c", -1.25, -1.0), ("d", -1.25, -1.0)]}


def test_a_report_of_a_long_run_is_no_larger(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    lines = (
        json.dumps({"step": step, "reward_mean": 0.123456789, "seconds_step": 1.0, "time": step})
        for step in range(50_000)
    )
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    contents = report_contents(folder.path)
    (curve,) = contents["curves"]
    assert len(curve["points"]) <= 601
    assert curve["points"][-1][0] == 49_999
    assert len(json.dumps(contents)) < 60_000


def test_a_run_that_has_written_nothing_yet_has_a_report(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.metrics_file.write_text('{"step": 1, "rew')  # a line that is being written
    contents = report_contents(folder.path)
    assert (contents["done"], contents["curves"], contents["state"]) == (0, [], "running")
    assert write_report(folder.path).is_file()


def _drawn(page: str, folder: Path) -> str:
    """The document that a browser has made of a page, opened from the disk."""
    file = folder / "shown.html"
    file.write_text(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [str(BROWSER), *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    folder = reported_run(tmp_path / "a")
    page = write_report(folder.path, _decode, "ownloop run mine").read_text()
    hover = "document.querySelector('#mismatch .token').dispatchEvent(new MouseEvent('mousemove'));"
    drawn = _drawn(page.replace("</body>", f"<script>{hover}</script></body>"), tmp_path)
    assert re.findall(r"<h2>(.*?)</h2>", drawn) == [
        "Curves",
        "Where the time went",
        "Timeline of the last steps",
        "Memory",
        "Evaluations side by side",
        "Trainer against generator, token by token",
        "Configuration",  # the last section: no script error came before it
    ]
    assert drawn.count('class="interval"') == 3
    assert drawn.count("<circle") == 3 * 20
    assert re.search(r"running; 20 of 40 steps", drawn)
    assert "No rule of docs/report.md warns of anything." in drawn
    assert drawn.count('class="reward"') == 6
    (tip,) = re.findall(r'<div id="tip".*?>(.*?)</div>', drawn, re.DOTALL)
    assert tip == '"c"\ntrainer    -1.2500\ngenerator  -1.0000\ndifference -2.50e-1'
