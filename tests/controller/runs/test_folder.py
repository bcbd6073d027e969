import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.runs.folder import RunFolder, began_at, complete_checkpoints, read_metrics, state_of
from rl.system.disk import to_json, write_json
from rl.types import Completion, Group
from tests.rl.fakes import single_turn
from tests.rl.recordings import disk_of, recorded_rows


@dataclass(frozen=True)
class Inner:
    """A nested configuration."""

    path: Path = Path("models/x")
    stop: tuple[str, ...] = ("\n",)


@dataclass(frozen=True)
class Config:
    """A configuration with what JSON has no word for."""

    inner: Inner = field(default_factory=Inner)
    learning_rate: float = 1e-5
    limit: float = math.inf


def group(num_rollouts: int = 2) -> Group:
    """One group with as many rollouts."""
    completion = Completion(tokens=(5, 6), logprobs=(-0.5, -0.25), versions=(3, 4), text="é\n", finish_reason="stop")
    rollout = single_turn((1, 2), completion, reward=0.5, metrics={"length": 2.0})
    return Group(problem_id="p1", prompt="2+2?", rollouts=(rollout,) * num_rollouts)


def lines(file: Path) -> list[dict[str, Any]]:
    """Every line of a .jsonl file, under JSON's strict grammar."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def test_config_is_written_at_once(tmp_path: Path) -> None:
    RunFolder(tmp_path / "runs" / "a", Config())
    config = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert config == {"inner": {"path": "models/x", "stop": ["\n"]}, "learning_rate": 1e-5, "limit": None}


def test_metrics_come_back_as_they_were_logged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", Config())
    folder.log_metrics({"step": 1.0, "reward_mean": 0.1 + 0.2, "grad_norm": math.nan})
    folder.log_metrics({"step": 2.0, "grad_norm": math.inf})
    first, second = folder.metrics()
    assert first["reward_mean"] == 0.1 + 0.2
    assert math.isnan(first["grad_norm"])
    assert math.isnan(second["grad_norm"])
    assert [row["step"] for row in lines(folder.metrics_file)] == [1.0, 2.0]


def test_every_step_is_on_disk_when_logged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", Config())
    for step in range(3):
        folder.log_metrics({"step": float(step)})
        assert len(lines(folder.metrics_file)) == step + 1


def test_rollouts_hold_everything_needed_to_train_on_them_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", Config())
    folder.log_rollouts(7, [group(2), group(1)])
    folder.flush()
    rows = recorded_rows(folder.path)
    assert [(row["step"], row["problem_id"], row["group"], row["sample"]) for row in rows] == [
        (7, "p1", 0, 0),
        (7, "p1", 0, 1),
        (7, "p1", 1, 0),
    ]
    assert rows[0] == {
        "step": 7,
        "split": "train",
        "group": 0,
        "sample": 0,
        "problem_id": "p1",
        "prompt": "2+2?",
        "reward": 0.5,
        "truncated": False,
        "out_of_context": False,
        "environment_s": 0.0,
        "metrics": [("length", 2.0)],
        "group_failures": [],
        "turns": [
            {
                "prompt": "",
                "prompt_tokens": [1, 2],
                "text": "é\n",
                "finish_reason": "stop",
                "tokens": [5, 6],
                "logprobs": [-0.5, -0.25],
                "versions": [3, 4],
                "temperature": 1.0,
                "kept": None,
                "routes": None,
                "routes_shape": None,
                "prompt_logprobs": None,
            }
        ],
    }


def test_resume_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a", Config()).log_metrics({"step": 1.0})
    file = tmp_path / "a" / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 2.0, "rew')
    assert [row["step"] for row in read_metrics(file)] == [1.0]
    resumed = RunFolder(tmp_path / "a", Config(), resume=True)
    resumed.log_metrics({"step": 2.0})
    assert [row["step"] for row in lines(file)] == [1.0, 2.0]


@pytest.mark.stranger("C11")
def test_a_run_keeps_the_time_at_which_it_began(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "a", Config())
    assert datetime.now() - first.began < timedelta(hours=1)
    first.close()
    (tmp_path / "a" / "began.json").write_text('{"time": "2024-02-29T23:59:00"}')
    resumed = RunFolder(tmp_path / "a", Config(), resume=True)
    assert resumed.began == began_at(tmp_path / "a") == datetime(2024, 2, 29, 23, 59)
    resumed.close()
    (tmp_path / "a" / "began.json").write_text('{"time": "yesterday"}')
    with pytest.raises(ValueError, match=r"began.json is damaged: .*yesterday"):
        RunFolder(tmp_path / "a", Config(), resume=True)
    assert RunFolder(tmp_path / "b", Config(), began=first.began).began == first.began


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a", Config()).log_metrics({"step": 1.0})
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder(tmp_path / "a", Config())
    assert len(read_metrics(tmp_path / "a" / "metrics.jsonl")) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="exists and is not a run's"):
        RunFolder(tmp_path, Config())
    assert (tmp_path / "config.json").read_text() == "{}"


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", Config())
    with pytest.raises(ValueError, match="is in use by another run"):
        RunFolder(folder.path, Config(), resume=True)
    folder.close()
    RunFolder(tmp_path / "a", Config(), resume=True)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunFolder(tmp_path / "a", Config(), resume=True)


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert RunFolder(tmp_path, Config()).metrics() == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "a", Config())
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "a" / "b", Config())


def test_no_permission() -> None:
    # /proc refuses new entries from everybody, the superuser included.
    with pytest.raises(ValueError, match="run folder /proc/ownloop cannot be written"):
        RunFolder(Path("/proc/ownloop"), Config())


def test_no_space(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MiB are free there; a run needs"):
        RunFolder(tmp_path / "a", Config(), min_free_bytes=1 << 60)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("room", [1, 100])
def test_a_folder_that_does_not_fit_leaves_its_name_free(tmp_path: Path, existing: bool, room: int) -> None:
    path, config = tmp_path / "runs" / "a", {"text": "x" * 10 * room}
    if existing:
        path.mkdir(parents=True)
    with disk_of(room), pytest.raises(ValueError, match=r"runs/a cannot be written: File too large"):
        RunFolder(path, config)
    assert [*tmp_path.rglob("*")] == ([path.parent, path] if existing else [])
    assert RunFolder(path, config).metrics() == []


def test_a_copy_of_a_checkpoint_is_the_user_s(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    for name, step in (("step-00002", 2), ("step-00010", 10), ("step-00010.bak", 10), ("step-old", 1)):
        (folder.checkpoints / name).mkdir(parents=True)
        write_json(folder.checkpoints / name / "loop.json", {"step": step, "trainers": []})
    folder.close()
    assert [path.name for path in complete_checkpoints(folder.checkpoints)] == ["step-00002", "step-00010"]
    assert state_of(folder.path) == "stopped, saved at 10"


@pytest.mark.parametrize(
    "content", ["{}", '{"step": 3}', '{"step": "3", "trainers": []}', '{"step": 3, "trainers": 1}']
)
def test_a_checkpoint_without_its_step_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "step-00003").mkdir()
    (tmp_path / "step-00003/loop.json").write_text(content)
    with pytest.raises(ValueError, match=r"step-00003/loop.json is damaged: it lacks 'step' or 'trainers'"):
        complete_checkpoints(tmp_path)


def test_saved_names_the_last_step_and_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", Config())
    assert "0 steps, no checkpoint" in folder.saved()
    folder.log_metrics({"step": 12.0})
    for step, part in ((10, "policy"), (12, ".policy.partial")):
        (folder.checkpoint_path(step) / part).mkdir(parents=True)
        write_json(folder.checkpoint_path(step) / "loop.json", {"step": step, "trainers": ["policy"]})
    assert "12 steps, 1 checkpoint, the last step-00010 in" in folder.saved()


def test_json_of_numpy_functions_and_mappings() -> None:
    value = {"a": np.float32(0.5), "b": np.array([1, 2]), 3: {"f": json.dumps}, "c": np.nan, "d": True}
    assert to_json(value) == {"a": 0.5, "b": [1, 2], "3": {"f": "json:dumps"}, "c": None, "d": True}
