"""A plan for a model of the hub, with the real client against a server on loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.tiny_models import tiny_llama
from tests.controller.runs.hub import Hub, running_hub
from tests.docs.pages import ROOT

pytestmark = pytest.mark.seconds

NAME = "lab/Tiny-1.5B"


def test_a_plan_fetches_no_weights(tmp_path: Path) -> None:
    with running_hub() as hub:
        model = tiny_llama(tmp_path / "model")
        hub.add(NAME, {file.name: file.read_bytes() for file in model.iterdir()})
        assert_planned_without_weights(hub, tmp_path / "home")


def assert_planned_without_weights(hub: Hub, home: Path) -> None:
    """In a process of its own, whose cache is empty."""
    words = ["plan", "grpo_smollm2_cpu", "--model", NAME, "--generator.max-model-len", "128"]
    code = f"from controller.commands.command_line import run_command; raise SystemExit(run_command({words}))"
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    inherited = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "every figure is computed" in done.stdout
    assert "config.json" in hub.fetched
    assert not any(name.endswith(".safetensors") for name in hub.fetched)
