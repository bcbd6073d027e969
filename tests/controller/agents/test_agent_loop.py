"""The loop over sessions, its task, and a run of its recipe.

Covers: controller/agents/agent_loop.py, controller/agents/look_up.py, controller/agents/repair.py,
configs/agent_smollm2_cpu.py, configs/agent_qwen3_gpu.py
"""

import ast
import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.agent_qwen3_gpu import recipe as gpu_recipe
from configs.agent_smollm2_cpu import recipe
from controller.agents.look_up import LookUp
from controller.agents.programs import AgentTask
from rl.envs.largest_number import LargestNumber


def test_training_and_held_out_numbers_differ() -> None:
    env = LookUp()
    train, held_out = env.train_problems(seed=0, start=0, count=50), env.eval_problems(50)
    assert train == [*env.train_problems(0, 0, 20), *env.train_problems(0, 20, 30)]
    assert not {task.id for task in train} & {task.id for task in held_out}
    numbers = [{int(task.answer) % 2 for task in tasks} for tasks in (train, held_out)]
    assert numbers == [{1}, {0}]
    for task in train:
        assert str(json.loads(task.files["book.json"])[task.files["name.txt"]]) == task.answer


@pytest.mark.parametrize(
    ("answer", "looked", "reward"), [("x", False, 0.0), ("x", True, 0.5), ("123", True, 1.0), (" 123.", True, 1.0)]
)
def test_half_of_the_reward_is_for_the_tool(tmp_path: Path, answer: str, looked: bool, reward: float) -> None:
    (tmp_path / "answer.txt").write_text(answer)
    (tmp_path / "looked.txt").write_text(str(looked))
    attempt: Any = None
    assert asyncio.run(LookUp().reward(AgentTask(id="t", answer="123"), tmp_path, attempt)) == reward


def test_every_mistake_fails_its_tests_and_its_repair_passes() -> None:
    env = gpu_recipe().agent_env
    tasks = [*env.train_problems(seed=0, start=0, count=40), *env.eval_problems(40)]
    assert len({task.files["work.py"] for task in tasks}) > 10
    for task in tasks:
        check = str(task.hidden["check.py"])
        name, source = (
            re.findall(r"from work import (\w+)", check)[0],
            ast.literal_eval(re.findall(r"exec\((.*), r", check)[0]),
        )
        tests = check.partition("\n")[2]
        exec(f"{source}\n{tests}", {})
        with pytest.raises((AssertionError, TypeError)):
            exec(f"{task.files['work.py']}\n{tests}", {})
        assert name in task.prompt
    assert not {task.files["work.py"] for task in tasks[:40]} & {task.files["work.py"] for task in tasks[40:]}


def test_the_loop_and_the_task_refuse_each_others_kind() -> None:
    with pytest.raises(ValueError, match="env is a LargestNumber; this loop needs an AgentEnv"):
        replace(recipe(), env=LargestNumber())
    with pytest.raises(TypeError, match="task '7' is for a program"):
        AgentTask(id="7").start()


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
