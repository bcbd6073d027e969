"""The report that a run keeps up to date: when it is written, and what that may cost."""

from pathlib import Path

import pytest

from controller.runs.folder import RunFolder
from ownloop_report.page import ReportWriter
from rl.system.disk import RecordingError
from rl.system.timeline import Timeline


class Clock:
    """Stands for the time that passes and for the processor's time that a thread uses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.used = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used


@pytest.mark.seconds
def test_writing_takes_a_hundredth_of_the_time_at_most(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path / "a", {}), Clock()
    took = 2.0

    def write(*arguments: object, **options: object) -> None:
        clock.used += took

    live = ReportWriter(folder, monotonic=clock.monotonic, thread_time=clock.thread_time, write=write)
    began = clock.now
    for step in range(1, 200):
        clock.now += 10.0
        live.after_step(step)
        folder.flush()
    assert clock.used >= 5 * took
    assert clock.used - took <= 0.01 * (clock.now - began)


def test_the_page_and_the_timeline_are_written_during_the_run(tmp_path: Path) -> None:
    folder, clock = RunFolder(tmp_path / "a", {"num_steps": 9}), Clock()
    folder.command = "ownloop run mine"
    live = ReportWriter(folder, monotonic=clock.monotonic, thread_time=clock.thread_time)
    folder.log_metrics({"step": 1.0, "reward_mean": 0.5})
    live.after_step(1)
    folder.flush()
    page = folder.path / "report.html"
    assert not page.exists()
    clock.now += 60
    live.after_step(2)
    folder.flush()
    assert '"state": "running"' in page.read_text()
    assert "ownloop run mine" in page.read_text()
    live.finish()
    folder.flush()
    assert '"state": "finished"' in page.read_text()
    folder.loop_end.has_come()
    folder.flush()
    assert '"state": "finished"' in page.read_text()
    live.after_step(3)  # as in a run that continues and is then stopped
    ReportWriter(folder)  # one that has done no step writes nothing
    folder.loop_end.call(live.stop)
    folder.loop_end.has_come()
    folder.flush()
    assert '"state": "stopped"' in page.read_text()


def test_a_mistake_in_the_page_ends_no_run_but_a_full_disk_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "a", {})
    live = ReportWriter(folder)
    config = (folder.path / "config.json").read_text()
    (folder.path / "config.json").write_text("[]")
    live.finish()
    folder.flush()
    assert "Traceback" in capfd.readouterr().err

    (folder.path / "config.json").write_text(config)

    def full(*arguments: object, **options: object) -> None:
        raise RecordingError(folder.path / "report.html", OSError(28, "No space left on device"))

    ReportWriter(folder, write=full).finish()
    with pytest.raises(RecordingError, match=r"report\.html cannot be written: No space left"):
        folder.flush()


def test_a_span_writes_nothing_during_a_step(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for _ in range(1000):
        with timeline.record("generator", "generate"):
            pass
    assert [*tmp_path.iterdir()] == []
    timeline.write()
    assert timeline.file.read_text().count('"ph": "X"') == 1000
