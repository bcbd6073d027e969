"""A recipe of the cookbook, unchanged, in a process of its own. Longer ones, of SmolLM2, are in tests/tinker/."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from plugins.server.tests.real_trainer_server import real_trainer_server
from plugins.server.tests.tinker.conftest import tiny_chat_model
from plugins.server.tests.tinker.datasets_here import HUB_MODEL, link_model, write_conversations
from tests.docs.pages import ROOT, blocks_of

COOKBOOK = importlib.util.find_spec("tinker_cookbook")


@pytest.mark.seconds
@pytest.mark.skipif(COOKBOOK is None, reason="the package tinker-cookbook, of the extra dev, is not installed")
@pytest.mark.slow  # the server without the cookbook: plugins/server/tests/test_serving.py
def test_a_supervised_recipe_learns(smollm2: Path, tmp_path: Path) -> None:
    model, recipe = tiny_chat_model(tmp_path / "model", smollm2), tmp_path / "recipe"
    write_conversations(recipe)
    link_model(recipe, model)
    served = {"names": (HUB_MODEL,), "vocab_size": 49152, "max_context": 1024}
    with real_trainer_server(tmp_path / "server", model, rank=32, **served) as server:
        options = {"log_path": "log", "model_name": HUB_MODEL, "batch_size": 4, "max_steps": 2, "learning_rate": 3e-2}
        arguments = [f"{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [sys.executable, "-m", "tinker_cookbook.recipes.sl_loop", *arguments],
            cwd=recipe,
            env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (recipe / "log" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows]
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.seconds
@pytest.mark.stranger("E2")
@pytest.mark.skipif(COOKBOOK is None, reason="the package tinker-cookbook, of the extra dev, is not installed")
@pytest.mark.slow
def test_the_pages_own_command_runs(smollm2: Path, tmp_path: Path) -> None:
    (block,) = (
        block for block in blocks_of(ROOT / "plugins" / "server" / "README.md") if "chat_sl.train" in block.text
    )
    model = tiny_chat_model(tmp_path / ".cache" / "ownloop" / "models" / "smollm2-135m-instruct", smollm2)
    served = {"names": ("smollm2-135m-instruct", str(model)), "vocab_size": 49152, "max_context": 1024}
    with real_trainer_server(tmp_path / "server", model, rank=32, **served) as server:
        script = block.text.replace("http://127.0.0.1:8000", server.url)
        (tmp_path / "tinker-env").symlink_to(sys.prefix)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len((tmp_path / "log" / "metrics.jsonl").read_text().splitlines()) == 4
