"""Word problems of one or two steps with small numbers, written in GSM8K's format: https://arxiv.org/abs/2110.14168.

They are a dataset for `rl.envs.math_problems` that needs no network, and that a model of 135 million parameters can
learn from. Each line is {"question": text, "answer": worked solution, "####" and the number}.
"""

import json
import os
import random
import tempfile
from pathlib import Path

from rl.cache import cache_directory

_NAMES = "Ada Ben Chen Dana Eli Fay Gus Hana Ivan Jo Kim Leo Mia Nora Omar Pia".split()
_THINGS = "apples books coins pens stamps shells cards beads".split()


def word_problems_file(num_problems: int = 4000) -> Path:
    """The dataset in ownloop's cache, written there if it is not there yet. The same on every machine."""
    file = cache_directory() / f"word-problems-{num_problems}.jsonl"
    if not file.exists():
        write_word_problems(file, num_problems)
    return file


def write_word_problems(file: Path, num_problems: int, seed: int = 0) -> None:
    """Writes different problems as JSON lines. `file` appears only when it is complete."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < num_problems:
        question, answer = _problem(rng)
        rows.setdefault(question, answer)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as part:
        part.writelines(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items())
    os.replace(part.name, file)  # noqa: PTH105 - another process may write the same file at the same time


def _problem(rng: random.Random) -> tuple[str, str]:
    """A question and its worked solution."""
    (name, other), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    a, b, c = rng.randint(3, 20), rng.randint(2, 12), rng.randint(2, 9)
    start = f"{name} has {a} {thing}."
    match rng.randrange(5):
        case 0:
            return f"{start} {other} gives {name} {b} more. {_now(name, thing)}", _solved((a, "+", b))
        case 1:
            a += b
            return f"{name} has {a} {thing}. {name} loses {b}. {_now(name, thing)}", _solved((a, "-", b))
        case 2:
            question = f"{name} has {c} boxes with {b} {thing} each. How many {thing} does {name} have?"
            return question, _solved((c, "*", b))
        case 3:
            question = f"{start} {other} has {b} more than {name}. How many {thing} do they have together?"
            return question, _solved((a, "+", b), (a, "+", a + b))
        case _:
            a += b
            question = f"{name} has {a} {thing}. {name} gives {b} to {other} and then buys {c}. {_now(name, thing)}"
            return question, _solved((a, "-", b), (a - b, "+", c))


def _now(name: str, thing: str) -> str:
    return f"How many {thing} does {name} have now?"


def _solved(*steps: tuple[int, str, int]) -> str:
    """A line for each step, and the last result after GSM8K's marker."""
    results = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
    lines = [f"{x} {sign} {y} = {results[sign](x, y)}" for x, sign, y in steps]
    return "\n".join([*lines, f"#### {lines[-1].rpartition(' ')[2]}"])
