"""The end of a long timeline, read without the rest."""

import json
from pathlib import Path

from ownloop_report.timeline_spans import read_timeline
from rl.system.timeline import Timeline


def test_only_the_end_of_a_long_timeline_is_read(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for number in range(100):
        with timeline.record("trainer", f"call {number}"):
            pass
        if number % 5 == 0:
            timeline.write()
    timeline.write()
    names = [name for process, name, *_ in read_timeline(timeline.file, 2000) if process == "trainer"]
    assert 5 < len(names) < 20
    assert names == [f"call {number}" for number in range(100)][-len(names) :]
    assert len({event["name"] for event in json.loads(timeline.file.read_text()) if event["ph"] == "X"}) == 100


def test_a_damaged_timeline_has_no_spans(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    assert read_timeline(file) == []
    timeline = Timeline(file)
    with timeline.record("trainer", "forward"):
        pass
    timeline.write()
    ((process, name, lane, begin, end),) = read_timeline(file)
    assert (process, name, lane) == ("trainer", "forward", 0)
    assert begin <= end
    file.write_text(file.read_text().partition('"dur"')[0])  # killed while it wrote
    assert read_timeline(file) == []
