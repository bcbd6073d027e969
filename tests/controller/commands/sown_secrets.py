"""A run whose recipe and options hold secrets, each of which begins with "SOWN"."""

import dataclasses
from pathlib import Path

from controller.commands.export_run import add_model_card
from controller.commands.recipes import load_recipe, override
from controller.commands.resume import resumed_configuration
from controller.commands.saved_recipe import save_recipe
from controller.runs.folder import RunFolder

SOWN = """
from dataclasses import dataclass, field
from rl.system.secret_fields import Secret
from tests.controller.commands.toy_recipe import ToyConfig

@dataclass(frozen=True, kw_only=True)
class Judge:
    api_key: Secret = "SOWN-1"
    option7: Secret | None = "SOWN-2"

@dataclass(frozen=True, kw_only=True)
class SecretConfig(ToyConfig):
    env: Judge = field(default_factory=Judge)
    model: str = "base"

def recipe():
    return SecretConfig()
"""


def run_with_secrets(tmp_path: Path) -> RunFolder:
    """A run of one step and its model, of the recipe `mine.py` in this folder."""
    file = tmp_path / "mine.py"
    file.write_text(SOWN)
    options = ["--env.option7", "SOWN-3", "--env.api-key=SOWN-4"]
    config = override(load_recipe(file), options, "ownloop")
    folder = RunFolder(tmp_path / "a", config)
    save_recipe(folder.path, file, options)
    folder.log_metrics({"step": 1.0})
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").write_text("{}")
    add_model_card(folder.path, "sums")
    assert dataclasses.asdict(resumed_configuration(folder.path, [])) == dataclasses.asdict(config)
    return folder
