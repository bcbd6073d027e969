"""What comes after a checkpoint is moved aside, byte for byte."""

from pathlib import Path

import pytest

from controller.runs.folder import RunFolder, read_metrics
from controller.runs.recording import free_folder
from rl.rollouts.columns import read_groups
from rl.system.disk import OwnedFolder
from tests.controller.runs.test_folder import group


def test_later_files_are_moved_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_rollouts(0, [group()], split="eval")
    for step in (1, 2):
        folder.log_metrics({"step": float(step)})
        folder.log_rollouts(step, [group(step)])
    before = folder.lengths()
    assert before == {"metrics.jsonl": folder.metrics_file.stat().st_size, "rollouts/eval": 0, "rollouts/step": 2}
    folder.log_rollouts(2, [group()], split="eval")
    folder.log_metrics({"step": 3.0})
    folder.log_rollouts(3, [group(3)])
    folder.flush()
    (folder.rollouts / ".step-00004.parquet.partial").write_text("half a file of a run that was killed")

    into = folder.cut_back(before)
    assert into is not None
    assert into.parent == folder.path / "cut_off"
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert [row["step"] for row in read_metrics(into / "metrics.jsonl")] == [3]
    assert {path.name for path in folder.rollouts.iterdir()} == {
        "eval-00000.parquet",
        "step-00001.parquet",
        "step-00002.parquet",
    }
    assert read_groups(into / "rollouts" / "step-00003.parquet") == [group(3)]
    assert (into / "rollouts" / "eval-00002.parquet").is_file()
    assert folder.cut_back(before) is None


def test_rollouts_may_lie_on_another_disk(tmp_path: Path) -> None:
    elsewhere = OwnedFolder("ownloop-test-", in_memory=True)
    if elsewhere.path.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system in memory")
    folder = RunFolder(tmp_path / "a", {})
    folder.rollouts.symlink_to(elsewhere.path)
    folder.log_rollouts(1, [group(1)])
    folder.log_rollouts(2, [group(2)])
    into = folder.cut_back({"rollouts/step": 1})
    assert into is not None
    assert [file.name for file in folder.rollouts.glob("*.parquet")] == ["step-00001.parquet"]
    assert read_groups(into / "rollouts" / "step-00002.parquet") == [group(2)]
    elsewhere.remove()


def test_cutting_back_to_the_beginning_keeps_everything_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1.0})
    folder.log_rollouts(0, [group()], split="eval")
    text = folder.metrics_file.read_text()
    first = folder.cut_back({})
    folder.log_metrics({"step": 1.0})
    second = folder.cut_back({})
    assert first is not None
    assert second not in (None, first)
    assert folder.metrics() == []
    assert (first / "metrics.jsonl").read_text() == text
    assert (first / "rollouts" / "eval-00000.parquet").is_file()


def test_folders_of_the_same_second_have_different_names(tmp_path: Path) -> None:
    for _ in range(3):
        free_folder(tmp_path).mkdir()
    assert len(list(tmp_path.iterdir())) == 3
