"""The page of a run: what it holds, and what a browser makes of it."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from controller.runs.folder import HOST_FILE, METRICS, RunFolder
from controller.runs.metric_rows import SCHEMA_VERSION
from ownloop_report.page import duration, report_contents, write_report
from plugins.report.tests.reported_runs import NASTY, dialogue, reported_run
from rl.system.disk import to_json, write_json
from rl.system.timeline import TIMELINE, Timeline

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
    times = ["seconds_step", "seconds_generate", "seconds_push", "seconds_engine_max"]
    assert [curve["label"] for curve in contents["other_curves"]] == [*times, "memory_peak_bytes_forward_max"]
    assert contents["timeline"]["processes"] == ["controller", "trainer"]
    (first, _) = contents["evaluations"]
    assert [answer["step"] for answer in first["answers"]] == [0, 10, 20]
    assert first["answers"][1]["tokens"][:2] == [("e", -1.0), ("v", -1.0)]
    sample = contents["mismatch"][0]
    assert sample == {"step": 20, "tokens": [("c", -1.25, -1.0, 0.25, False), ("d", -1.25, -1.0, 0.25, False)]}


@pytest.mark.stranger("F6")
def test_the_headline_has_change_duration_hardware_and_versions(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "a").path
    write_json(run / HOST_FILE, {"hardware": "8 x GPU", "versions": "ownloop 1.0"})
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    timed = [json.dumps({**row, "time": 1000.0 + 400 * i}) for i, row in enumerate(rows)]
    (run / METRICS).write_text("".join(f"{line}\n" for line in timed))
    assert report_contents(run)["headline"] == [
        ("held-out reward", "0.000 to 0.500, after 0 and 20 steps"),
        ("duration", "2 h 26 min"),
        ("hardware", "8 x GPU"),
        ("versions", "ownloop 1.0"),
    ]


@pytest.mark.stranger("F6")
@pytest.mark.parametrize(
    ("rows", "headline"),
    [
        ([], []),
        ([{"step": 1, "loss": 2.5}], [("training loss", "2.500 after 1 steps")]),
        (
            [{"step": i, "reward_mean": i / 4} for i in (1, 3)],
            [("training reward", "0.250 to 0.750, after 1 and 3 steps")],
        ),
        ([{"step": 1, "time": 5, "seconds_step": 2}, {"step": 2, "time": 10}], [("duration", "7 s")]),
        ([{"step": i, "time": t} for i, t in enumerate((4000, 4010, 400, 405))], [("duration", "15 s")]),  # set back
    ],
)
def test_a_headline_leaves_out_what_is_not_known(tmp_path: Path, rows: list[Any], headline: list[Any]) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.metrics_file.write_text(
        "".join(json.dumps({**row, "schema_version": SCHEMA_VERSION}) + "\n" for row in rows)
    )
    assert report_contents(folder.path)["headline"] == headline


def test_a_clock_set_back_between_two_starts_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    rows = [{"step": i, "time": t, "seconds_step": 1.0} for i, t in enumerate((4000, 4010, 400, 405))]
    lines = [json.dumps({**row, "schema_version": SCHEMA_VERSION}) + "\n" for row in rows]
    folder.metrics_file.write_text("".join(lines))
    timeline = Timeline(folder.path / TIMELINE)
    with timeline.record("controller", "generate"):
        pass
    timeline.write()
    assert report_contents(folder.path)["timeline"] == {"processes": [], "spans": [], "seconds": 0.0}


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.6, "1 min 0 s"), (3600, "1 h 0 min"), (3 * 86400 + 7300, "3 d 2 h")]
)
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.stranger("F6")
@pytest.mark.parametrize(
    ("peak", "unit", "value"), [(5.6 * 2**30, "GiB", 5.6), (700 * 2**20, "MiB", 700), (2048, "KiB", 2), (3, "bytes", 3)]
)
def test_memory_is_in_a_unit_that_fits(tmp_path: Path, peak: float, unit: str, value: float) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1, "seconds_step": 1.0, "memory_peak_bytes_forward_max": peak})
    (curve,) = report_contents(folder.path)["memory"]
    assert (curve["unit"], curve["points"]) == (unit, [[1, pytest.approx(value)]])


def test_a_report_of_a_long_run_is_no_larger(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    lines = (
        json.dumps(
            {
                "step": step,
                "reward_mean": 0.123456789,
                "seconds_step": 1.0,
                "time": step,
                "schema_version": SCHEMA_VERSION,
            }
        )
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


NUM_SHOWN, NUM_FOLDED = 3, 5
"""Of the curves of `reported_run`: reward, loss and memory; and the metrics behind `more metrics`."""


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
    hover = (
        "document.querySelector('#mismatch .token').dispatchEvent(new MouseEvent('mousemove'));"
        "const view = document.getElementById('view'); view.value = 'share of the gradient';"
        "view.dispatchEvent(new Event('change'));"
    )
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
    assert drawn.count("<circle") == (NUM_SHOWN + NUM_FOLDED) * 20
    (folded,) = re.findall(r'<details id="others".*?</details>', drawn, re.DOTALL)
    assert folded.count("<circle") == NUM_FOLDED * 20
    assert re.search(r"running; 20 of 40 steps", drawn)
    assert "No rule of plugins/report/README.md warns of anything." in drawn
    assert drawn.count('class="reward"') == 6
    (tip,) = re.findall(r'<div id="tip".*?>(.*?)</div>', drawn, re.DOTALL)
    told = '"c"\ntrainer    -1.2500\ngenerator  -1.0000\ndifference -2.50e-1\nratio      0.7788\ngradient   +25.0 %'
    assert tip == told  # four tokens alike
    assert drawn.count(">step 20: 50.0 % of the step's gradient, 0 of 2 tokens clipped</div>") == 2
    assert drawn.count("rgba(var(--mark), 0.75)") + drawn.count("rgba(var(--mark),0.750)") == 4


@pytest.mark.stranger("F6")
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_narrow_page_fits_its_window_and_is_legible(tmp_path: Path) -> None:
    folder = reported_run(tmp_path / "a")
    folder.log_rollouts(20, [dialogue("c")], split="eval")
    folder.flush()
    page = write_report(folder.path, _decode, "ownloop run mine").read_text()
    measure = (
        "const inner = frame.contentWindow, all = inner.document;"
        "document.title = JSON.stringify({window: inner.innerWidth, page: all.documentElement.scrollWidth, overflow: "
        "Math.max(...[...all.querySelectorAll('.card')].map(c => c.getBoundingClientRect().right)) - "
        "all.getElementById('main').getBoundingClientRect().right, scales: "
        "[...all.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width),"
        "messages: [...all.querySelectorAll('div.message')].map(m => m.textContent)});"
    )
    frame = f'<iframe id="frame" width="400" height="900" srcdoc="{html.escape(page)}"></iframe>'
    drawn = _drawn(f"<title></title>{frame}<script>frame.onload = () => {{{measure}}}</script>", tmp_path)
    found = json.loads(html.unescape(re.findall(r"<title>(.*?)</title>", drawn)[0]))
    assert found["page"] <= found["window"] == 400
    assert found["overflow"] <= 0.5
    assert len(found["scales"]) == NUM_SHOWN + NUM_FOLDED + 2  # where the time went, and the timeline
    assert min(found["scales"]) > 0.8  # text of 11 pixels has 9 or more
    assert found["messages"] == ["no, again"]
