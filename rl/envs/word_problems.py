"""Word problems of one or two steps with small numbers, written in GSM8K's format: https://arxiv.org/abs/2110.14168.

They are a dataset for `rl.envs.math_problems` that needs no network, and that a model of 135 million parameters can
learn from. Each line is {"question": text, "answer": worked solution, "####" and the number}.
"""

import json
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rl.data.streams import content_id
from rl.system.disk import cache_directory

_NAMES = "Ada Ben Chen Dana Eli Fay Gus Hana Ivan Jo Kim Leo Mia Nora Omar Pia".split()
_THINGS = "apples books coins pens stamps shells cards beads".split()


def word_problems_file(num_problems: int = 4000, *, max_steps: int = 2) -> Path:
    """The dataset in ownloop's cache, written there if it is not there yet. The same on every machine.

    `max_steps` is the most calculations that a problem needs, 1 or 2.
    """
    rows = _rows(num_problems, 0, max_steps)
    file = cache_directory() / f"word-problems-{content_id(rows)}.jsonl"  # another version writes another file
    if not file.exists():
        _write(file, rows)
    return file


def write_word_problems(file: Path, num_problems: int, seed: int = 0) -> None:
    """Writes different problems as JSON lines. `file` appears only when it is complete."""
    _write(file, _rows(num_problems, seed, max_steps=2))


def _rows(num_problems: int, seed: int, max_steps: int) -> dict[str, str]:
    """Question -> worked solution. Raises ValueError for another `max_steps` than 1 and 2."""
    if max_steps not in (1, 2):
        raise ValueError(f"max_steps is {max_steps}; it must be 1 or 2")
    rng, rows = random.Random(seed), dict[str, str]()
    while len(rows) < num_problems:
        question, answer = _problem(rng, max_steps)
        rows.setdefault(question, answer)
    return rows


def _write(file: Path, rows: Mapping[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as part:
        part.writelines(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items())
    os.replace(part.name, file)  # noqa: PTH105 - another process may write the same file at the same time


def _problem(rng: random.Random, max_steps: int) -> tuple[str, str]:
    """A question and its worked solution."""
    (name, other), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    a, b, c = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 9)
    match rng.randrange(3 if max_steps == 1 else 5):
        case 0:
            start = f"{name} has {a} {thing}. {other} gives {name} {b} more."
            return f"{start} {_now(name, thing)}", _solved((a, "+", b))
        case 1:
            return f"{name} has {a + b} {thing}. {name} loses {b}. {_now(name, thing)}", _solved((a + b, "-", b))
        case 2:
            question = f"{name} has {c} boxes with {b} {thing} each. How many {thing} does {name} have?"
            return question, _solved((c, "*", b))
        case 3:
            start = f"{name} has {a + b} {thing}. {name} loses {b} and then finds {c}."
            return f"{start} {_now(name, thing)}", _solved((a + b, "-", b), (a, "+", c))
        case _:
            start = f"{name} has {c} boxes with {b} {thing} each, and finds {a} more."
            return f"{start} {_now(name, thing)}", _solved((c, "*", b), (c * b, "+", a))


def _now(name: str, thing: str) -> str:
    return f"How many {thing} does {name} have now?"


def _solved(*steps: tuple[int, str, int]) -> str:
    """A line for each step, and the last result after GSM8K's marker."""
    results = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
    lines = [f"{x} {sign} {y} = {results[sign](x, y)}" for x, sign, y in steps]
    return "\n".join([*lines, f"#### {lines[-1].rpartition(' ')[2]}"])
