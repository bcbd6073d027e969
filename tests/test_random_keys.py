"""Every random draw of the product has a key of its own: two draws by one key would be one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEEDED = {"Random", "default_rng", "hashed_number", "manual_seed"}
DRAWS = {
    # purpose: key
    "order of examples": "[seed, epoch]",
    "order of rows of an environment": 'f"{seed}/{epoch}"',
    "what is held out": 'f"split/{spaced_alike(text)}"',
    "a problem's number": 'f"{key}/{attempt}"',
    "a problem by its number": "number",
    "a wrong answer": 'f"rejected/{problem.id}"',
    "minibatches": '[*b"minibatches", *seed]',
    "bootstrap": '[*b"bootstrap"]',
    "clip_cov": '[*b"clip_cov", len(covariance), len(candidates)]',
    "a task of a mixture": 'f"mixture/{seed}/{number}"',
    "a task of a mixture, by that": 'hashed_number(f"mixture/{seed}/{number}")',
    "the seed of a task": 'f"task/{name}/{seed}"',
    "look_up": 'f"look_up/{seed}/{index}"',
    "look_up, held out": 'f"look_up/eval/{index}"',
    "repair": 'f"repair/{seed}/{index}"',
    "repair, held out": 'f"repair/eval/{index}"',
    "an adapter": "int.from_bytes(digest[:7])",
    "weights of a new model": "config.seed",
    "a token of numerics bitwise": "key",
}
OF_DOCTORS_AND_TINY_MODELS = {"seed", "0"}  # weights and data that nothing is learned from


def _keys(file: Path) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args)
    return {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).rpartition(".")[2] in SEEDED}


@pytest.mark.stranger("2.C5")
def test_no_two_random_draws_share_a_key() -> None:
    files = [file for part in ("rl", "trainer", "generator", "controller") for file in (ROOT / part).rglob("*.py")]
    files += (ROOT / "plugins").glob("*/ownloop_*/**/*.py")
    known = {ast.unparse(ast.parse(key)) for key in DRAWS.values()}
    assert set().union(*map(_keys, files)) == known | OF_DOCTORS_AND_TINY_MODELS
    purposes = [re.sub(r"\{.*?\}", "", key) for key in DRAWS.values()]
    assert len(set(purposes)) == len(purposes) - 1  # "/" is of two: a problem's key begins with "train" or "heldout"
