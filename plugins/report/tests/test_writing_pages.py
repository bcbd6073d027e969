"""The report that a run keeps up to date: when it is written, and what that may cost."""

import io
import os
import re
from pathlib import Path

import numpy as np
import pytest

from controller.commands.saved_recipe import command_of
from controller.runs import Console, LoopConfig
from controller.runs.folder import RunFolder
from controller.runs.step_log import StepLog
from ownloop_report.page import ReportWriter, describe_host, write_report
from ownloop_report.samples import read_token_samples
from rl.rollouts.evaluation import Evaluation, Measurement
from rl.system.disk import RecordingError
from rl.system.timeline import Timeline
from tests.controller.commands.finished_runs import finished_run, in_this_process
from tests.controller.commands.sown_secrets import run_with_secrets
from tests.controller.runs.other_schemas import OTHER_SCHEMAS, run_of_schema
from trainer.config import TrainerConfig


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
    folder.loop_end.call(live.close)
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


def test_a_host_is_described_by_its_gpus_processor_and_memory(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon 1\nprocessor\t: 1\nmodel name\t: Xeon 1\n")
    for gpu in ("0000:01", "0000:02"):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    described = describe_host(tmp_path / "cpuinfo", tmp_path)
    assert re.fullmatch(r"2 x NVIDIA H100, Xeon 1, \d+ cores, [\d.]+ GiB of memory", described)
    assert describe_host(tmp_path / "none", tmp_path / "none").startswith(os.uname().machine)


def test_no_secret_is_in_the_page(tmp_path: Path) -> None:
    folder = run_with_secrets(tmp_path)
    write_report(folder.path, None, command_of(folder.path), None)
    page = (folder.path / "report.html").read_text()
    assert "option7" in page
    assert not re.findall(r"SOWN-?\d*", page)


@pytest.mark.parametrize(("schema", "found"), OTHER_SCHEMAS)
def test_another_schema_is_refused(schema: int | None, found: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"is a run of schema {found}"):
        write_report(run_of_schema(tmp_path / "a", schema))


def test_a_run_ends_with_its_curves(tmp_path: Path) -> None:
    config = LoopConfig(model="none", trainer=TrainerConfig(), num_steps=4, learning_rate=1e-3)
    folder = RunFolder(tmp_path / "a", config)
    log = StepLog(folder, Console(io.StringIO()), config.num_steps)
    for step, loss in ((0, 2.0), (4, 1.0)):
        log.evaluation(step, Evaluation(measurements={"loss": Measurement(values=np.full(3, loss))}))
    log.finish()
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (folder.path / "report.html").read_text()


def test_a_run_keeps_what_its_tokens_do_to_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch, tmp_path)
    run = finished_run("a", "--loss", "ppo", "--loss-config", "observation_coef", "0.1")
    samples = read_token_samples(run)
    assert {len(sample["share"]) == len(sample["tokens"]) == len(sample["clipped"]) for sample in samples} == {True}
    assert 0 < sum(abs(share) for sample in samples for share in sample["share"]) <= len({s["step"] for s in samples})
    assert not any(clipped for sample in samples for clipped in sample["clipped"])  # on-policy
