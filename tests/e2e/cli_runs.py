"""Runs of the command line as processes of their own, to be killed."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills.cell import process_of
from controller.runs.folder import read_metrics
from controller.runs.metric_rows import is_timing
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parent.parent.parent


def ownloop(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts `ownloop run` in a folder, which has the model of `tiny_recipe`."""
    if not (tmp_path / "model").exists():
        served_llama(tmp_path / "model", tied=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OWNLOOP_TINY_MODEL": str(tmp_path / "model")}
    command = [sys.executable, "-m", "controller.commands.cli", "run", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def metric_rows(run: Path) -> list[dict[str, float]]:
    """The metrics, timings aside."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: row[name] for name in row if not is_timing(name)} for row in rows]


def model_hash(run: Path) -> str:
    """A hash of the trained model."""
    (file,) = (run / "model").glob("*.safetensors")
    return hashlib.blake2b(file.read_bytes()).hexdigest()


def wait(run: subprocess.Popen[str], until: Callable[[], Any], every_s: float = 0.02) -> None:
    """Waits for something that comes while the run goes on."""

    def has_come() -> bool:
        if until():
            return True
        assert run.poll() is None, run.communicate(timeout=LIMIT_S)[0]
        return False

    wait_until(has_come, "the run", 400, every_s)


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Waits until the run has recorded a step."""
    wait(run, lambda: any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")))


def kill_controller(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Kills the run's controller after a step, and waits until its processes have ended too."""
    wait_for_step(run, folder, step)
    run.kill()
    run.wait(LIMIT_S)
    log = folder / "logs" / "trainer-0.log"
    wait_until(lambda: process_of(log) is None, "the run's processes to notice, and end as well", every_s=0.1)
