"""Supervised recipes of the cookbook, unchanged: `python -m pytest -m slow test_supervised_recipes.py`."""

import ast
import math
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.locked_environment import locked_python
from ownloop_server.child_server import Server
from plugins.server.tests.tinker.conftest import learns
from plugins.server.tests.tinker.datasets_here import write_preferences
from plugins.server.tests.tinker.recipes import (
    CHAT_FORMAT,
    LOCK,
    begin_recipe,
    kill_recipe,
    metric,
    run_recipe,
    wait_for_checkpoints,
)
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def bundled_conversations() -> Path:
    """The cookbook's example."""
    find = "import tinker_cookbook, pathlib; print(pathlib.Path(tinker_cookbook.__file__).parent)"
    found = subprocess.run(
        [locked_python(LOCK), "-c", find], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    return Path(found.stdout.strip()) / "example_data" / "conversations.jsonl"


def test_chat_sl_learns_the_bundled_conversations_and_resumes(server: Server, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model_name": server.model,
        "renderer_name": CHAT_FORMAT,
        "dataset": bundled_conversations(),
        "batch_size": 16,
        "max_length": 256,
        "learning_rate": 3e-4,
        "lr_schedule": "constant",
        "save_every": 2,
    }
    recipe = begin_recipe(server, "chat_sl.train", tmp_path, **options)
    wait_for_checkpoints(recipe, tmp_path, 2)
    kill_recipe(recipe)
    before = len(metric(tmp_path / "log", "train_mean_nll"))
    log = run_recipe(server, "chat_sl.train", tmp_path, behavior_if_log_dir_exists="resume", **options)
    losses = metric(log, "train_mean_nll")
    print("train_mean_nll", [round(loss, 3) for loss in losses])
    assert 4 <= before < 8
    assert len(losses) < before + 8  # it went on, and did not begin again
    if learns():
        assert losses[-1] < losses[0] - 0.3
        assert fmean(losses[before:]) < losses[0] - 0.2  # with the weights of the checkpoint


def test_dpo_begins_at_ln_2_and_falls(server: Server, tmp_path: Path) -> None:
    write_preferences(tmp_path)
    options: dict[str, Any] = {"batch_size": 8, "max_length": 128, "learning_rate": 1e-4, "max_steps": 5}
    log = run_recipe(
        server, "preference.dpo.train", tmp_path, model_name=server.model, renderer_name=CHAT_FORMAT, **options
    )
    losses = metric(log, "dpo_loss")
    print("dpo_loss", [round(loss, 4) for loss in losses])
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    if learns():
        assert losses[-1] < losses[0] - 0.05


_DECISION = """
import asyncio, sys, tinker
from tinker_cookbook import renderers
from tinker_cookbook.recipes.decisions import Decision, DecisionRenderer, decision_choice_datums, sample_decision
from tinker_cookbook.tokenizer_utils import get_tokenizer

async def main(model):
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(model, rank=8)
    renderer = DecisionRenderer(renderers.get_renderer("qwen3_instruct", get_tokenizer(model)))
    decision = Decision("What is the capital of France?", [("rome", ""), ("paris", "in France"), ("oslo", "")])
    for _ in range(2):
        client = await training.save_weights_and_get_sampling_client()
        print(await sample_decision(client, renderer.render(decision)))
        for _ in range(4):
            await training.forward_backward(decision_choice_datums(renderer, [(decision, "oslo")]), "cross_entropy")
            await training.optim_step(tinker.AdamParams(learning_rate=1e-3))

asyncio.run(main(sys.argv[1]))
"""


def test_decisions_are_scored_and_learned(server: Server, tmp_path: Path) -> None:
    env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"}
    command = [str(locked_python(LOCK)), "-c", _DECISION, str(server.model)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert list(first) == ["rome", "paris", "oslo"]
    assert sum(first.values()) == pytest.approx(1, abs=1e-5)
    assert second["oslo"] > first["oslo"]
