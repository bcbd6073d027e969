"""Dashboards, with the real packages, each read back with the package's own reader."""

import gc
import importlib
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.runs.folder import RunFolder
from controller.runs.observers import Observers, check_observers
from rl.system.secret_fields import Secret
from rl.types import Group
from tests.controller.commands.test_cli import ownloop
from tests.rl.fakes import completion, single_turn
from tests.waiting import wait_until

METRICS = [
    {"step": 0.0, "eval_reward": 0.25},
    {"step": 1.0, "reward_mean": 0.5, "loss": math.nan},
    {"step": 2.0, "reward_mean": 0.75, "loss": 0.125},
]


@dataclass(frozen=True)
class Keyed:
    """A configuration with a secret."""

    seed: int = 3
    api_key: Secret = "sk-1"


def needs(package: str) -> Any:
    """A test is skipped where an extra is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the extra {package!r}, which is not installed")


def group(answer: str) -> Group:
    """One rollout."""
    return Group(problem_id="p", prompt="what | is it", rollouts=(single_turn((1,), completion(answer), reward=0.5),))


def log(name: str, folder: RunFolder, metrics: Sequence[dict[str, float]] = METRICS) -> None:
    """Logs as a run does, and closes the observers."""
    warnings: list[str] = []
    observers = Observers([name], folder, warnings.append)
    for row in metrics:
        observers.log_metrics(row)
        split = "eval" if "eval_reward" in row else "train"
        observers.log_rollouts(int(row["step"]), [group("an answer")], split=split)
    observers.close()
    folder.flush()
    assert warnings == []


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "a", Keyed())
    log("tensorboard", folder)
    read: Any = EventAccumulator(str(folder.path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/reward_mean")] == [(1, 0.5), (2, 0.75)]
    assert [(event.step, event.value) for event in read.Scalars("eval/reward")] == [(0, 0.25)]
    assert math.isnan(read.Scalars("train/loss")[0].value)
    assert set(read.Tags()["tensors"]) == {"config", "samples/eval", "samples/train"}
    (text,) = read.Tensors("samples/eval")
    assert "| what \\| is it | an answer | 0.5 |" in text.tensor_proto.string_val[0].decode()
    config = str(read.Tensors("config"))
    assert "seed" in config
    assert "sk-1" not in config
    assert len(folder.metrics()) == 3, "the files are always written"


def resumed(folder: RunFolder, name: str) -> RunFolder:
    """Steps 1 to 4, a checkpoint after 2 and its evaluation, then 3 to 5 by the run that was resumed there."""
    steps = [{"step": float(step), "seconds_step": 1.0, "reward_mean": step / 8} for step in range(1, 6)]
    evaluation = {"step": 2.0, "eval_reward": 0.25}
    observers, lengths = Observers([name], folder, pytest.fail), dict[str, int]()
    for row in (*steps[:2], evaluation, *steps[2:4]):
        observers.log_metrics(row)
        lengths = lengths or (folder.lengths() if row is steps[1] else {})
    observers.close()
    path, config = folder.path, folder.config
    del folder, observers
    gc.collect()
    again = RunFolder(path, config, resume=True)
    again.cut_back(lengths)
    observers = Observers([name], again, pytest.fail)
    observers.each(lambda observer: observer.resume(2))
    for row in (evaluation, *steps[2:]):
        observers.log_metrics(row)
    observers.close()
    return again


@needs("tensorboard")
@pytest.mark.stranger("2.C9")
def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = resumed(RunFolder(tmp_path / "a", Keyed()), "tensorboard")
    read: Any = EventAccumulator(str(folder.path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/reward_mean")] == [
        (s, s / 8) for s in range(1, 6)
    ]
    assert [(event.step, event.value) for event in read.Scalars("eval/reward")] == [(2, 0.25)]
    assert len(read.Tensors("config")) == 1


def blocks_of(file: Path) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format (https://github.com/google/leveldb, doc/log_format.md)."""
    data, place, record = file.read_bytes(), 7, b""  # after W&B's own header
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left  # the rest of a block is too short for a header
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if place + 7 + length > len(data):  # it is being written
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_records(run: Path) -> list[dict[str, Any]]:
    """What an offline run wrote, of every time it was begun."""
    from wandb.proto import wandb_internal_pb2

    found: list[dict[str, Any]] = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in blocks_of(file):
            record: Any = getattr(wandb_internal_pb2, "Record")()  # noqa: B009
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                found.append({"id": record.run.run_id, "name": record.run.display_name})
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                found.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return found


@needs("wandb")
@pytest.mark.stranger("2.F5")
@pytest.mark.seconds
def test_a_process_with_wandb_ends_without_a_word(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from controller.commands.processes import end_descendants
from controller.runs.folder import RunFolder
from ownloop_report.wandb_run import WandbRun
run = WandbRun(RunFolder(Path({str(tmp_path / "a")!r}), {{}}))
run.log_metrics({{"step": 1.0}})
run.close()
end_descendants(0.5)
"""
    env = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert "Traceback" not in done.stderr


@needs("wandb")
@pytest.mark.slow  # W&B's service is a process of its own
def test_wandb_offline_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "a", {})
    log("wandb", folder)
    second = int(time.time())
    wait_until(lambda: time.time() > second + 1, "the next second, after which W&B names its folders")
    log("wandb", folder, [{"step": 3.0, "reward_mean": 1.0}])
    # On a busy host the service writes its last record after it has said that the run is finished.
    wait_until(lambda: {"step": 3, "train/reward_mean": 1.0} in wandb_records(folder.path), "the last record")
    records = wandb_records(folder.path)
    runs = {(record["id"], record["name"]) for record in records if "id" in record}
    assert runs == {((folder.path / "dashboard_id").read_text(), "a")}
    rewards = [(record["step"], record["train/reward_mean"]) for record in records if "train/reward_mean" in record]
    assert rewards == [(1, 0.5), (2, 0.75), (3, 1.0)]
    (shown,) = [record for record in records if "samples/eval._type" in record]
    assert (shown["samples/eval._type"], shown["samples/eval.nrows"], shown["step"]) == ("table-file", 1, 0)
    (file,) = folder.path.glob("wandb/*/files/media/table/samples/*.json")
    assert json.loads(file.read_text())["data"] == [["what | is it", "an answer", 0.5]]


@needs("wandb")
def test_wandb_without_a_login_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    folder = RunFolder(tmp_path / "a", {})
    with pytest.raises(ValueError, match="there is no login: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE"):
        Observers(["wandb"], folder, print)


@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    for module in ("trackio.utils", "trackio.sqlite_storage", "trackio.media.utils", "trackio.media.media"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.MEDIA_DIR", tmp_path / "trackio" / "media", raising=False)
    folder = RunFolder(tmp_path / "a", {})
    log("trackio", folder)
    (name,) = database.get_runs("ownloop")
    assert name == f"a-{(folder.path / 'dashboard_id').read_text()}"
    rows: Any = database.get_logs("ownloop", name)
    rewards = [(row["step"], row["train/reward_mean"]) for row in rows if "train/reward_mean" in row]
    assert rewards == [(1, 0.5), (2, 0.75)]
    again = resumed(RunFolder(tmp_path / "b", {}), "trackio")
    rows = database.get_logs("ownloop", f"b-{(again.path / 'dashboard_id').read_text()}")
    assert [row["step"] for row in rows if "train/reward_mean" in row] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/reward" in row] == [2]


CRASHING = """
from dataclasses import dataclass
from controller.runs.observers import Observers

@dataclass(frozen=True, kw_only=True)
class CrashingConfig:
    seed: int = 0
    def loop(self):
        return train

async def train(config, folder, console):
    log = Observers(["wandb", "tensorboard"], folder, console.warn)
    log.log_metrics({"step": 1.0, "reward_mean": 0.5})
    raise RuntimeError("boom")

def recipe():
    return CrashingConfig()
"""


@pytest.mark.slow  # for the same reason
@needs("wandb")
@needs("tensorboard")
def test_a_run_that_crashes_has_logged_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "mine.py").write_text(CRASHING)
    result = ownloop(tmp_path, "run", "mine.py", "--name", "a")
    assert result.returncode == 1
    assert result.stderr.startswith("error: RuntimeError: boom")
    # W&B's own exit handler may say that its service was gone before it.
    assert "RuntimeError" not in result.stderr.removeprefix("error: RuntimeError: boom")
    assert "/controller/runs/observers" not in result.stderr
    run = tmp_path / "runs" / "a"
    assert [record["train/reward_mean"] for record in wandb_records(run) if "train/reward_mean" in record] == [0.5]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log names 'wandb'.* `pip install wandb`"):
        check_observers(["wandb"])
    with pytest.raises(ValueError, match=r"log is 'wandbb'.* 'wandb'"):
        check_observers(["wandbb"])
