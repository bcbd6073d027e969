"""Run folders as a run leaves them that is killed: copied in the midst of a call, while the run itself goes on."""

import contextlib
import hashlib
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from controller.runs.folder import complete_checkpoints, read_metrics
from controller.runs.metric_rows import is_timing
from tests.docs.in_process import InProcessTrainer
from tests.docs.loop_runs import run_loop
from tests.rl.recordings import recorded_rows

STEPS: dict[str, Any] = {"num_steps": 6, "checkpoint_every": 2, "evaluate_every": 3}
KILLS = ("optim_step", "save_checkpoint")
"""Calls in whose midst a run is killed: it has a gradient and no step yet, or a part of a checkpoint."""


@contextmanager
def killed_after(step: int, run: Path) -> Generator[dict[str, Path]]:
    """Within the block, copies of `run` are made as soon as it has recorded this step: one for each of `KILLS`.

    Yields call -> its copy. A copy is made when the last trainer of the loop enters the call, so that those of the
    others have been carried out.
    """
    copies: dict[str, Path] = {}

    def with_copy(call: str) -> Any:
        inner = getattr(InProcessTrainer, call)

        async def outer(self: InProcessTrainer, *args: Any, **kwargs: Any) -> Any:
            if any(row["step"] == step and "seconds_step" in row for row in read_metrics(run / "metrics.jsonl")):
                copy = run.with_name(f"killed in {call}")
                if call not in copies or (call == "save_checkpoint" and _same_save(copy, run)):
                    copies[call] = _copied(run, copy)
            return await inner(self, *args, **kwargs)

        return outer

    with pytest.MonkeyPatch.context() as patch:
        for call in KILLS:
            patch.setattr(InProcessTrainer, call, with_copy(call))
        yield copies


def _copied(run: Path, copy: Path) -> Path:
    """A copy as of one moment. What another trainer renames meanwhile, when its checkpoint is whole, begins it anew."""
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(shutil.Error, FileNotFoundError):
            return shutil.copytree(run, copy)


def _same_save(copy: Path, run: Path) -> bool:
    """Whether the run is still at the checkpoint that it had begun when the copy was made."""
    return complete_checkpoints(copy / "checkpoints") == [
        copy / "checkpoints" / path.name for path in complete_checkpoints(run / "checkpoints")
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    """Every row, timings aside."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: row[name] for name in row if not is_timing(name)} for row in rows]


def rollouts(run: Path) -> list[dict[str, Any]]:
    """What was sampled, timings aside."""
    return [{name: value for name, value in row.items() if name != "environment_s"} for row in recorded_rows(run)]


def _weights(run: Path) -> str:
    (file,) = (run / "model").glob("*.safetensors")
    return hashlib.blake2b(file.read_bytes()).hexdigest()


def same_after_kills(loop: str, whole: Path, **changes: Any) -> None:
    """Asserts that runs that were killed and resumed have the steps, rollouts and weights of the one left alone.

    Call `launch_in_process` first. `changes` replace fields of the loop's recipe.
    """
    with killed_after(4, whole) as killed:
        run_loop(loop, whole, **STEPS, **changes)
    assert killed.keys() == {*KILLS}
    for call, run in killed.items():
        assert complete_checkpoints(run / "checkpoints"), "the kill was before the first checkpoint"
        run_loop(loop, run, resume=True, **STEPS, **changes)
        assert metrics(run) == metrics(whole), call
        assert rollouts(run) == rollouts(whole), call
        assert _weights(run) == _weights(whole), call
