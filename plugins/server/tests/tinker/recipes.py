"""Recipes of the cookbook as clients of a server, in an environment of their own.

The environment is made from requirements/tinker.lock once, which takes a minute or two.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.locked_environment import locked_python
from ownloop_server.child_server import Server
from tests.waiting import LIMIT_S, wait_for_end, wait_until

LOCK = Path(__file__).parents[4] / "requirements" / "tinker.lock"
CHAT_FORMAT = "qwen3_instruct"
"""The cookbook's name for the chat format of SmolLM2."""


def run_recipe(server: Server, name: str, folder: Path, *, timeout_s: float = 1500, **options: Any) -> Path:
    """Runs `tinker_cookbook.recipes.<name>` to its end in `folder`. Returns the folder of its metrics and checkpoints.

    Data sets that the recipe would take from a hub are found in `folder`: see `datasets_here.py`. Options that are None
    are left out.
    """
    status, output, _ = wait_for_end(begin_recipe(server, name, folder, **options), f"the recipe {name}", timeout_s)
    assert status == 0, f"{output[-4000:]}\n{server.said()[-2000:]}"
    return folder / "log"


def begin_recipe(server: Server, name: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Starts a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    given = {"log_path": folder / "log", **options}
    arguments = [f"{option}={value}" for option, value in given.items() if value is not None]
    command = [str(locked_python(LOCK)), "-m", f"tinker_cookbook.recipes.{name}", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_checkpoints(recipe: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Waits until a recipe that runs in `folder` has saved so many checkpoints."""
    checkpoints = folder / "log" / "checkpoints.jsonl"

    def saved() -> bool:
        if checkpoints.exists() and checkpoints.read_text().count("\n") >= count:
            return True
        assert recipe.poll() is None, recipe.communicate(timeout=LIMIT_S)[0][-4000:]
        return False

    wait_until(saved, f"{count} checkpoints", 1500, every_s=0.05)


def kill_recipe(recipe: subprocess.Popen[str]) -> None:
    """Ends a recipe with SIGKILL."""
    recipe.kill()
    wait_for_end(recipe, "a recipe that was killed")


def metric(log: Path, name: str) -> list[float]:
    """A metric of every step that has it."""
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    values = [row[name] for row in rows if name in row]
    assert values, f"no {name!r} in {sorted({key for row in rows for key in row})}"
    return values
