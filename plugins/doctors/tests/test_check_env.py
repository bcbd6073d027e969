import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.commands.recipes import find_recipe, load_recipe
from ownloop_doctors.check_parts import load_env
from ownloop_tasks.guess_number import GuessNumber
from rl.envs.largest_number import LargestNumber

ROOT = Path(__file__).parents[3]
TOY_RECIPE = ROOT / "tests" / "controller" / "commands" / "toy_recipe.py"

MINE = """
from dataclasses import dataclass
from rl.protocols import Done

@dataclass
class Problem:
    id: str
    prompt: str
    def start(self):
        return self
    def reply(self, completion):
        return Done(reward=float("nan") if completion == "42" else 0.0)

class Mine:
    name, stop = "mine", ()
    def train_problems(self, seed, start, count):
        return [Problem(f"{seed} {i}", f"{seed} + {i}") for i in range(start, start + count)]
    def eval_problems(self, count):
        return [Problem(f"- {i}", f"- {i}") for i in range(count)]
"""


def _check_env(cwd: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "controller.commands.cli", "check-env", name]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_an_author_is_told_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    result = _check_env(tmp_path, "mine:Mine")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [
        "problem '0 0', answered '42' each time, failed: its reward is nan; it must be a finite number"
    ]


def test_nothing_wrong_is_said_too(tmp_path: Path) -> None:
    result = _check_env(tmp_path, "ownloop_tasks.guess_number:GuessNumber")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("nothing is wrong with it\n\nattack ")


def test_an_environment_is_named_by_its_recipe_or_its_module(here: Path) -> None:
    assert load_env("grpo_smollm2_cpu") == LargestNumber()
    assert load_env("ownloop_tasks.guess_number:GuessNumber") == GuessNumber()
    (here / "some_env.py").write_text("from ownloop_tasks.guess_number import GuessNumber\nenv = GuessNumber(span=3)\n")
    assert load_env("some_env:env") == GuessNumber(span=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_module:Env",
            "'no_such_module:Env' cannot be made: ModuleNotFoundError: No module",
        ),
        ("ownloop_tasks.guess_number:GuessNumbr", "cannot be made: .* has no attribute 'GuessNumbr'"),
        ("rl.envs.reasoning:ReasoningGym", "ReasoningGym.task is missing"),
        ("no_such_recipe", "no_such_recipe"),
        (str(TOY_RECIPE), "has no environment"),
    ],
)
def test_what_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_env(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"env": object()}, "env is a object, and its name is None"),
        ({"env": LargestNumber}, "LargestNumber is a class; an instance of it is needed"),
    ],
)
def test_a_recipe_that_cannot_be_learned_from_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(load_recipe(find_recipe("guess_grpo_smollm2_cpu")), **changes)
