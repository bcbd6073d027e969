"""The scripts in examples/, as a user starts them. `.ci/run` runs this file too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_the_loop_of_the_readme(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "grpo_loop.py", "--num-steps", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+: mean reward (\d\.\d+)", result.stdout, re.MULTILINE)]
    assert len(rewards) == 1
    assert all(0 < reward < 1 for reward in rewards)  # problems that are sometimes solved, so that there is a signal


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize(
    ("script", "printed"),
    [("train_a_program", r"^step 0: mean reward \d\.\d+"), ("self_play", r"^step 0: the first player won \d+ of 32")],
)
def test_scripts_of_other_pages(script: str, printed: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / f"{script}.py", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(printed, result.stdout, re.MULTILINE)
