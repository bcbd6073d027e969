"""The timeline of a run, in Chrome's trace format."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from controller.runs.folder import RunFolder
from rl.algorithms.metrics import PhaseClock
from rl.system.timeline import Timeline, collect_gauges, gauge, span, wall_time


def _events(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())


def _spans(file: Path) -> list[tuple[str, str, int, float, float]]:
    """(process, name, lane, begin, end) of each span, in seconds since 1970."""
    events = _events(file)
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(names[e["pid"]], e["name"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    return [(process, name, lane, begin / 1e6, end / 1e6) for process, name, lane, begin, end in spans]


async def test_phases_and_calls_of_a_loop_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"

    async def call(process: str, until: asyncio.Barrier) -> None:
        with span(process, "generate"):
            await until.wait()

    began = time.time()
    timeline = Timeline(file)
    timeline.activate()
    clock = PhaseClock()
    with clock("generate"):
        all_run = asyncio.Barrier(3)
        await asyncio.gather(*(call(process, all_run) for process in ("generator", "generator", "trainer")))
    with clock("pull"):
        await call("generator", asyncio.Barrier(1))
    timeline.write()
    ended = time.time()
    for event in _events(file):
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid"} <= event.keys()
    spans = {(process, name, lane): (begin, end) for process, name, lane, begin, end in _spans(file)}
    assert {(p, n) for p, n, _ in spans} == {("controller", "generate"), ("controller", "pull")} | {
        (process, "generate") for process in ("generator", "trainer")
    }
    lanes = [lane for process, _, lane, *_ in _spans(file) if process == "generator"]
    assert sorted(lanes) == [0, 0, 1], "two overlap; the third has the first lane again"
    begin, end = spans["controller", "generate", 0]
    assert began <= begin <= end <= ended + 0.001  # its clock is not quite the one of `ended`


async def test_gauges_are_counters_and_metrics_of_a_step(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.activate()
    take = collect_gauges()
    for process, values in (("a", {"full_max": 1.0, "hits": 1.0}), ("b", {"full_max": 3.0, "hits": 0.0})):
        await asyncio.create_task(asyncio.to_thread(gauge, process, values))
    assert take() == {"full_max": 3.0, "hits": 0.5}
    assert take() == {}
    timeline.write()
    counters = [event["args"] for event in _events(tmp_path / "timeline.json") if event["ph"] == "C"]
    assert counters == [{"full_max": 1.0, "hits": 1.0}, {"full_max": 3.0, "hits": 0.0}]
    assert _spans(tmp_path / "timeline.json") == []


def test_nothing_is_recorded_outside_a_run() -> None:
    with span("trainer", "forward"):
        pass


def test_the_file_is_whole_after_every_write_and_survives_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    for number in range(3):
        timeline = Timeline(file)  # as in a run that is resumed
        for name in ("a", "b"):
            with timeline.record("trainer", f"{name}{number}"):
                pass
            timeline.write()
            timeline.write()
    names = [f"{name}{number}" for number in range(3) for name in ("a", "b")]
    assert [name for _, name, *_ in _spans(file)] == names
    file.write_text(file.read_text().partition('b2"')[0])  # killed while it wrote
    with Timeline(file).record("generator", "lost"):
        pass
    timeline = Timeline(file)
    with timeline.record("generator", "last"):
        pass
    timeline.write()
    assert [name for _, name, *_ in _spans(file)] == [*names[:-1], "last"]


def test_a_span_that_fails_is_recorded_and_frees_its_lane(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for _ in range(2):
        with pytest.raises(RuntimeError), timeline.record("trainer", "forward"):
            raise RuntimeError
    timeline.write()
    assert [lane for _, _, lane, *_ in _spans(timeline.file)] == [0, 0]


def test_very_many_calls_do_not_fill_the_disk(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", max_calls=5)
    for _ in range(9):
        with timeline.record("generator", "generate"), timeline.record("controller", "generate"):
            pass
    timeline.write()
    processes = [process for process, *_ in _spans(timeline.file)]
    assert (processes.count("generator"), processes.count("controller")) == (5, 9)


def test_a_clock_that_is_set_back_does_not_turn_time_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall_time()
    assert abs(before - time.time()) < 60
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() - 3600) * 1e9))
    timeline, file = Timeline(tmp_path / "timeline.json"), tmp_path / "timeline.json"
    with timeline.record("trainer", "forward"):
        pass
    timeline.count("trainer", {"cpu": 1.0})
    timeline.write()
    times = [event["ts"] / 1e6 for event in _events(file) if "ts" in event]
    assert len(times) == 2
    assert all(before <= at <= wall_time() for at in times)
    folder = RunFolder(tmp_path / "run", {})
    folder.log_metrics({"step": 1.0})
    assert before <= folder.metrics()[0]["time"] <= wall_time()
