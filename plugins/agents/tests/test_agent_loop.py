"""The loop over sessions, its task, and a run of its recipe."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from configs.agent_qwen3_gpu import recipe as gpu_recipe
from configs.agent_smollm2_cpu import recipe
from controller.commands.resume import replayed
from controller.runs.folder import complete_checkpoints
from ownloop_agents.look_up import LookUp
from ownloop_agents.programs import AgentTask
from ownloop_sandbox.sandboxes import Work
from plugins.agents.tests.chatting import chat_model
from rl.envs.largest_number import LargestNumber
from rl.rollouts.columns import read_groups
from tests.e2e.cli_runs import kill_controller, metric_rows, ownloop, wait
from tests.waiting import wait_for_end

RECIPE = str(Path(__file__).with_name("tiny_agent_recipe.py"))


def test_training_and_held_out_numbers_differ() -> None:
    env = LookUp()
    train, held_out = env.train_problems(seed=0, start=0, count=50), env.eval_problems(50)
    assert train == [*env.train_problems(0, 0, 20), *env.train_problems(0, 20, 30)]
    assert not {task.id for task in train} & {task.id for task in held_out}
    numbers = [{int(task.answer[1]) % 2 for task in tasks} for tasks in (train, held_out)]
    assert numbers == [{1}, {0}]
    for task in train:
        name, page = str(task.files["question.txt"]).split()
        assert json.loads(task.files["book.json"])[page] == f"{name} {task.answer[1]}"


@pytest.mark.parametrize(
    ("found", "reward"), [(["", ""], 0.0), (["17", "12"], 0.5), (["71", "123"], 0.5), (["17", "123"], 1.0)]
)
def test_half_of_the_reward_is_for_the_tool(found: list[str], reward: float) -> None:
    work, attempt, content = Work(), cast(Any, None), json.dumps(found).encode()
    work.add({"name": "answer.json", "mode": 0o644, "size": len(content)}, content)
    assert asyncio.run(LookUp().reward(AgentTask(id="t", answer=["17", "123"]), work, attempt)) == reward


def _differs(function: Any, given: Any, expected: Any) -> bool:
    try:
        return function(*given) != expected
    except TypeError:
        return True


def test_every_mistake_fails_its_tests_and_its_repair_passes() -> None:
    env: Any = gpu_recipe().env
    tasks = [*env.train_problems(seed=0, start=0, count=40), *env.eval_problems(40)]
    assert len({task.files["work.py"] for task in tasks}) > 10
    for task in tasks:
        name, cases = task.answer
        space: dict[str, Any] = {}
        exec(str(task.files["work.py"]), space)
        assert any(_differs(space[name], *case) for case in cases)
        assert name in task.prompt
    assert not {task.files["work.py"] for task in tasks[:40]} & {task.files["work.py"] for task in tasks[40:]}


def test_the_loop_and_the_task_refuse_each_others_kind() -> None:
    with pytest.raises(ValueError, match="env is a LargestNumber; this loop needs an AgentEnv"):
        replace(recipe(), env=LargestNumber())
    with pytest.raises(ValueError, match="--replay is for loops that sample rollouts; AgentConfig runs programs"):
        replayed(recipe(), Path("runs/other"))
    with pytest.raises(TypeError, match="task '7' is for a program"):
        AgentTask(id="7").start()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_killed_run_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    chat_model(tmp_path / "model")
    whole = ownloop(tmp_path, RECIPE, "--name", "whole")
    status, output, _ = wait_for_end(whole, "the whole run", 300)
    assert status == 0, output
    folder = tmp_path / "runs" / "killed"
    run = ownloop(tmp_path, RECIPE, "--name", "killed")
    wait(run, lambda: complete_checkpoints(folder / "checkpoints"))
    kill_controller(run, folder, 3)
    status, output, _ = wait_for_end(ownloop(tmp_path, "--resume", "killed"), "the resumed run", 300)
    assert status == 0, output
    expected, found = (metric_rows(tmp_path / "runs" / name) for name in ("whole", "killed"))
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    names = ("reward_mean", "completion_tokens_mean", "session_calls", "grad_norm", "eval_reward")
    for one, other in zip(found, expected, strict=True):
        # Requests meet in other batches, whose log-probs differ in the last bits.
        ours, theirs = ({name: row[name] for name in names if name in row} for row in (one, other))
        assert ours == pytest.approx(theirs, rel=1e-3), one["step"]
    tokens = [
        [turn.completion.tokens for group in read_groups(file) for rollout in group.rollouts for turn in rollout.turns]
        for name in ("whole", "killed")
        for file in sorted((tmp_path / "runs" / name / "sessions").iterdir())
    ]
    assert tokens[:6] == tokens[6:]
    assert "Sessions of programs" in (folder / "report.html").read_text()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_a_run_of_the_recipe(tmp_path: Path) -> None:
    options = ["--num-steps", "1", "--num-eval", "4", "--prompts-per-step", "2", "--runs", str(tmp_path / "runs")]
    command = [str(Path(sys.executable).with_name("ownloop")), "run", "agent_smollm2_cpu", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert any("session_calls" in row or "eval_reward" in row for row in rows)
