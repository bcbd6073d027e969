"""The whole thing, as a user starts it: real processes, the real model, a few small steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.runs.metric_rows import is_timing
from controller.runs.models import resolve_model
from tests.generator.served_models import served_llama
from tests.rl.recordings import recorded_rows
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

SMALL = (
    *("--seed", "2"),  # with it there is something to learn from in both steps
    *("--num-steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--num-eval", "8"),
    *("--trainer.num-threads", "1", "--generator.num-threads", "1", "--sampling.max-tokens", "6"),
)
TINY_RECIPE = str(Path(__file__).with_name("tiny_recipe.py"))


def _ownloop(folder: Path, recipe: str, *options: str) -> subprocess.Popen[str]:
    """A run in a session of its own, whose processes can be counted when it is over."""
    served_llama(folder / "model", tied=True)
    command = [sys.executable, "-m", "controller.commands.cli", "run", recipe]
    return subprocess.Popen(
        [*command, "--runs", str(folder), "--name", "run", *options],
        env={**os.environ, "OWNLOOP_TINY_MODEL": str(folder / "model")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _left_behind(session: int) -> list[int]:
    """Processes of that session that still run."""
    left: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, *_, of_session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(of_session) == session and state != "Z":
                left.append(int(entry.name))
    return left


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# Of the main job's numbers: bfloat16, where the recipe computes in it, itself costs about 0.03 per token of this model.
@pytest.mark.parametrize(
    ("recipe", "mismatch"),
    [(TINY_RECIPE, 1e-5), pytest.param("grpo_smollm2_cpu", 0.045, marks=pytest.mark.slow)],
    ids=["tiny", "smollm2"],
)
def test_a_run_leaves_what_it_promises(recipe: str, mismatch: float, tmp_path: Path) -> None:
    run = _ownloop(tmp_path, recipe, *SMALL)
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output
    wait_until(lambda: not _left_behind(run.pid), "the run's processes to end")
    assert output.rstrip().splitlines()[-1].startswith("Held-out reward went from ")
    assert "Monarch" not in output
    assert "vllm" not in output.lower()

    folder = tmp_path / "run"
    rows = _rows(folder / "metrics.jsonl")
    steps = [row for row in rows if "seconds_push" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert steps[0]["logprob_mismatch_mean"] <= mismatch
    assert steps[0]["ratio_mean"] == pytest.approx(1, abs=0.02)
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2]
    rollouts = recorded_rows(folder)
    assert len([r for r in rollouts if r["split"] == "train"]) == 2 * 4 * 4
    turns = [turn for r in rollouts if r["step"] == 2 and r["split"] == "train" for turn in r["turns"]]
    assert {version for turn in turns for version in turn["versions"]} == {1}
    train, eval_data = ({r["problem_id"] for r in rollouts if r["split"] == split} for split in ("train", "eval"))
    assert train.isdisjoint(eval_data)
    config = json.loads((folder / "config.json").read_text())
    assert config["group_size"] == 4
    assert "trainer-0.log" in {file.name for file in (folder / "logs").iterdir()}

    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    begun_with = resolve_model(config["model"])
    original = AutoModelForCausalLM.from_pretrained(begun_with).state_dict()
    assert trained.keys() == original.keys()
    assert any((trained[name] != original[name]).any() for name in original)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder / "model", begun_with)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


KILLED = """
import os, signal
from benchmarks.kills.cell import process_of
from controller.runs import Run
from tests.e2e.tiny_recipe import recipe

before_step, killed = Run.before_step, []

async def killing(run, step):
    if step == 3 and not killed:  # by the run itself, so that it is never too late
        killed.append(process_of(run.log_dir / "evaluator-0.log"))
        os.kill(killed[0], signal.SIGKILL)
    await before_step(run, step)

Run.before_step = killing
"""


@pytest.mark.slow  # the order of what happens: tests/controller/runs/test_training_run.py
def test_evaluations_apart_measure_the_same(tmp_path: Path) -> None:
    """The same training and evaluations as between steps; the evaluator's death only costs a restart."""
    runs: dict[str, list[dict[str, Any]]] = {}
    (killed := tmp_path / "killed_recipe.py").write_text(KILLED)
    for name in ("between", "apart", "killed"):
        options = (
            "--evaluation",
            "between" if name == "between" else "apart",
            "--checkpoint-every",
            "1",
            "--num-steps",
            "12",
        )
        run = _ownloop(tmp_path / name, str(killed) if name == "killed" else TINY_RECIPE, *options)
        output, _ = run.communicate(timeout=400)
        assert run.returncode == 0, output
        assert ("restarting after" in output) is (name == "killed")
        runs[name] = _rows(tmp_path / name / "run" / "metrics.jsonl")
        wait_until(lambda run=run: not _left_behind(run.pid), "the run's processes to end")

    def rows(name: str, *, evaluations: bool) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in row.items() if not is_timing(key)}
            for row in runs[name]
            if ("eval_reward" in row) is evaluations
        ]

    assert [row["eval_version"] for row in rows("apart", evaluations=True)] == [*range(0, 14, 2)]
    for name in ("apart", "killed"):
        assert rows(name, evaluations=True) == rows("between", evaluations=True)
        assert rows(name, evaluations=False) == rows("between", evaluations=False)
