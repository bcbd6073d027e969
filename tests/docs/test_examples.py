"""The scripts in examples/, as a user starts them. `.ci/run` runs this file too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


def output_of(script: Path, folder: Path, *arguments: str) -> str:
    """Standard output of a script that is run in a folder, and must succeed."""
    command = [sys.executable, script, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_the_loop_of_the_readme(tmp_path: Path) -> None:
    output = output_of(ROOT / "examples" / "grpo_loop.py", tmp_path, "--num-steps", "1")
    rewards = [float(reward) for reward in re.findall(r"^step \d+: mean reward (\d\.\d+)", output, re.MULTILINE)]
    assert len(rewards) == 1
    assert all(0 < reward < 1 for reward in rewards)  # problems that are sometimes solved, so that there is a signal
