"""A run of a model of the hub records its commit, and has the same files when it is resumed."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rl.tiny_models import tiny_llama
from tests.controller.commands.test_cli import ROOT, add_checkpoint, command
from tests.controller.runs.hub import running_hub
from tests.waiting import LIMIT_S

RECIPE = """
from dataclasses import dataclass
from controller.runs.models import resolve_model

@dataclass(frozen=True, kw_only=True)
class HubConfig:
    model: str = "lab/tiny"
    seed: int = 0

    def loop(self):
        return train

async def train(config, folder, console):
    console.note(resolve_model(config.model).name)

def recipe():
    return HubConfig()
"""


@pytest.mark.seconds
def test_the_commit_is_recorded_and_kept(tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in tiny_llama(tmp_path / "model").iterdir()}
    (tmp_path / "mine.py").write_text(RECIPE)
    with running_hub() as hub:
        settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        env = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command("run", *arguments),
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )

        refused = run("mine.py", "--name", "a")
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: model lab/tiny is neither a directory here nor a model at")
        assert not (tmp_path / "runs").exists()

        first = hub.add("lab/tiny", files)
        assert run("mine.py", "--name", "a").stdout == f"{first}\n"
        folder = tmp_path / "runs" / "a"
        assert json.loads((folder / "config.json").read_text())["model"] == f"lab/tiny@{first}"

        hub.add("lab/tiny", {**files, "config.json": files["config.json"] + b"\n"})
        add_checkpoint(folder)
        (folder / "finished.json").unlink()
        resumed = run("--resume", "a")
        assert (resumed.returncode, resumed.stdout) == (0, f"{first}\n"), resumed.stderr
