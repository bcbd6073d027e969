"""RL recipes of the cookbook, unchanged: `python -m pytest -m slow test_reinforcement_recipes.py`."""

from pathlib import Path
from typing import Any

import pytest

from ownloop_server.child_server import Server
from plugins.server.tests.tinker.conftest import learns
from plugins.server.tests.tinker.recipes import CHAT_FORMAT, metric, run_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def check_count(rewards: list[float], num_steps: int) -> None:
    """All steps were made. Where one answer in thirty is right, a few of them show nothing else."""
    print("reward", [round(reward, 3) for reward in rewards])
    assert len(rewards) == num_steps


def check_rises(rewards: list[float], num_steps: int) -> None:
    """The last half of the steps has a higher mean than the first step, which the untrained model plays."""
    check_count(rewards, num_steps)
    if learns():
        half = num_steps // 2
        assert sum(rewards[-half:]) / half > rewards[0]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("importance_sampling", {}),
        ("ppo", {}),
        ("cispo", {}),
        ("gspo", {"loss_fn_config": '{"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}'}),
        ("importance_sampling", {"max_steps_off_policy": 1}),
        ("cispo", {"max_steps_off_policy": 2}),
    ],
    ids=["importance_sampling", "ppo", "cispo", "gspo", "async_importance_sampling", "async_cispo"],
)
def test_math_rl_of_sums(server: Server, tmp_path: Path, loss: str, options: dict[str, Any]) -> None:
    sizes = {"group_size": 8, "groups_per_batch": 8, "max_tokens": 8, "max_steps": 4, "learning_rate": 2e-4}
    log = run_recipe(
        server,
        "math_rl.train",
        tmp_path,
        model_name=server.model,
        renderer_name=CHAT_FORMAT,
        env="arithmetic",
        loss_fn=loss,
        **sizes,
        **options,
    )
    check_rises(metric(log, "env/all/reward/total"), 4)


def test_guess_number_runs_to_its_end(server: Server, tmp_path: Path) -> None:
    # Every turn of a game is a sequence of its own, and an evaluation has 800 games.
    sizes = {"group_size": 2, "batch_size": 1, "max_tokens": 8, "max_steps": 2, "learning_rate": 2e-4, "eval_every": 0}
    log = run_recipe(
        server,
        "multiplayer_rl.guess_number.train",
        tmp_path,
        model_name=server.model,
        renderer_name=CHAT_FORMAT,
        **sizes,
    )
    check_count(metric(log, "env/all/reward/total"), 2)
