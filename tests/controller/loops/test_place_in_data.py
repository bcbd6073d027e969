"""Every item is trained on once, in order, whatever numbers of items the steps of a run, its resumes and forks take."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from controller.runs.folder import read_metrics
from controller.runs.recording import read_recording
from rl.data.sources import EnvExamples, EnvPreferences
from rl.envs.procedural import TextProblem
from rl.tiny_tasks import EvenWords
from tests.docs.loop_runs import LOOPS, run_loop
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("in_one_process")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered(EvenWords):
    """Problems whose ids are their numbers in the stream. Notes which ones are asked for."""

    asked: ClassVar[list[int]] = []

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        self.asked.extend(range(start, start + count))
        made = EvenWords.train_problems(self, seed, start, count)
        return [
            TextProblem(id=str(n), prompt=each.prompt, score=each.score, answer="w2", wrong_answers=("w3",))
            for n, each in enumerate(made, start=start)
        ]


SIZES = {"sft": "examples_per_step", "dpo": "pairs_per_step"}
SOURCES = {"sft": EnvExamples, "dpo": EnvPreferences}


def _run(loop: str, path: Path, size: int, **changes: Any) -> None:
    data = {"data": SOURCES[loop](env=Numbered())} if loop in SOURCES else {"env": Numbered()}
    sizes = {SIZES.get(loop, "prompts_per_step"): size}
    fixed = {"checkpoint_every": 1, "keep_checkpoints": 99, "evaluate_every": 99}
    run_loop(loop, path, **data, **sizes, **fixed, **changes)


@pytest.mark.stranger("2.C3")
@pytest.mark.stranger("2.C4")
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_of_any_size_take_every_item_once(loop: str, tmp_path: Path) -> None:
    assert_every_item_comes_once(loop, tmp_path)


def assert_every_item_comes_once(loop: str, tmp_path: Path, **changes: Any) -> None:
    """In three stages, each with other sizes; a later one may begin before the end of the one before."""
    draw, path, done = random.Random(loop), tmp_path / "run", 0
    trained = list[int]()
    for stage in range(3):
        last, first_asked = done + draw.choice((2, 3)), len(Numbered.asked)
        size, rollouts = draw.choice((1, 2, 3, 5)), draw.choice((2, 3))
        group = {} if loop in SOURCES else {"group_size": rollouts}
        _run(loop, path, size, num_steps=last, resume=stage > 0, **group, **changes)
        kept = last - draw.choice((0, 1)) if stage < 2 else last
        for step in range(kept + 1, last + 1):  # as a fork at an earlier step, or after a crash
            shutil.rmtree(path / "checkpoints" / f"step-{step:05d}")
        if loop in SOURCES:  # DPO's reference has scored them before
            (path / "reference.json").unlink(missing_ok=True)
            trained += Numbered.asked[first_asked:][-(last - done) * size :][: (kept - done) * size]
        else:
            recorded = read_recording(path / "rollouts")
            steps = [recorded[step] for step in range(done + 1, kept + 1)]
            trained += [int(group.problem_id) for groups in steps for group in groups]
            assert {len(group.rollouts) for groups in steps for group in groups} == {rollouts}
        done = kept
    assert sorted(trained) == list(range(len(trained)))


@pytest.mark.stranger("2.C10")
@pytest.mark.parametrize("loop", ["sft", "dpo"])
def test_more_steps_stretch_a_schedule(loop: str, tmp_path: Path) -> None:
    """docs/resume.md: the steps to come have the rates of a run that had so many steps from its beginning."""
    for name, stages in {"resumed": (2, 5), "whole": (5,)}.items():
        for last in stages:
            _run(loop, tmp_path / name, 2, num_steps=last, warmup_steps=0, resume=last > stages[0])
    resumed, whole = (
        [row["learning_rate"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "learning_rate" in row]
        for name in ("resumed", "whole")
    )
    assert resumed[2:] == whole[2:]
    assert resumed[1] < resumed[2], "it had nearly come to its end"
    assert "stretches a schedule" in (ROOT / "docs" / "resume.md").read_text()
