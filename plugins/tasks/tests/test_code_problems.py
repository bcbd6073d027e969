"""Code problems from files, and what answers to them earn."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs import code_qwen3_5_gpu
from ownloop_doctors.check_env import check_env
from ownloop_tasks.code_problems import CodeProblem, CodeProblems, python_of
from rl.protocols import Done

pytestmark = pytest.mark.seconds
TESTS = ("assert add(1, 2) == 3", "assert add(0, 0) == 0")
RIGHT = "def add(a, b):\n    return a + b"


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def _rows(count: int) -> list[dict[str, Any]]:
    """Rows in MBPP's format."""
    return [
        {"text": f"Add {i}.", "code": f"def f(a):\n    return a + {i}", "test_list": [f"assert f(1) == {i + 1}"]}
        for i in range(count)
    ]


def _env(folder: Path, rows: list[dict[str, Any]], **options: Any) -> CodeProblems:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CodeProblems(dataset=str(file), sandbox="none", **options)


def _scored(completion: str, **options: Any) -> tuple[float, Mapping[str, float]]:
    settings: dict[str, Any] = {"setup": "", "tests": TESTS, "partial_credit": False, "time_limit_s": 20.0, **options}
    problem = CodeProblem(id="add", prompt="Add.", sandbox="none", **settings)
    done: Done = asyncio.run(problem.reply(completion))
    return done.reward, done.metrics


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        (RIGHT, 1.0),
        (f"print('x' * 100_000)\n{RIGHT}", 1.0),  # what it prints counts for nothing, however much it is
        (f"{RIGHT}\nif __name__ == '__main__':\n    add(int(input()), 2)", 1.0),
        ("def add(a, b):\n    return 3", 0.5),
        ("def add(a, b):\n    return a - b", 0.5),
        ("def add(a, b:", 0.0),
        (f"{RIGHT}\nraise SystemExit(0)", 0.0),
        ("import os, sys\nsys.__stdout__.write('2')\nsys.__stdout__.flush()\nos._exit(0)", 0.0),
        ("def add(a, b):\n    raise SystemExit(0)", 0.0),
        ("import atexit, os\natexit.register(os.write, 1, b'0')\ndef add(a, b):\n    return 3", 0.5),
        ("text = '\ud800'", 0.0),
        ("text = '\0'", 0.0),
    ],
)
def test_code_earns_what_its_tests_say(code: str, passed: float) -> None:
    completion = f"First I thought of\n```python\npass\n```\nbut:\n```python\n{code}\n```\n"
    assert _scored(completion) == (float(passed == 1), {"code_found": 1.0, "tests_passed": passed})
    assert _scored(completion, partial_credit=True)[0] == passed


@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *arguments: None",
        "import builtins\nbuiltins.str = lambda number: '2'",
        "import sys\nsys._getframe(1).f_globals['passed'] = 2",
        "import builtins\nbuiltins.BaseException = ()",
    ],
)
def test_code_that_replaces_what_counts_the_tests_earns_nothing(code: str) -> None:
    assert _scored(f"```python\n{code}\ndef add(a, b):\n    return None\n```", partial_credit=True)[0] == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```bash\npip install x\n```\nand then\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```python\nx = 0\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("1. First\n   ```Python\n   x = 1\n   ```", "x = 1\n"),
        ("~~~python3\r\nx = 1\r\n~~~", "x = 1\n"),
        ('```py title="a.py"\nx = 1\n```', "x = 1\n"),
        ("````python\nx = '```'\n````", "x = '```'\n"),
        ("```python\nx = 1", ""),
        ("```json\n{}\n```", ""),
        ("x = 1", ""),
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str, code: str) -> None:
    assert python_of(text) == code


def test_no_code_and_endless_code_earn_nothing() -> None:
    assert _scored(RIGHT) == (0.0, {"code_found": 0.0, "tests_passed": 0.0})
    assert _scored("```python\nwhile True: pass\n```", time_limit_s=0.5)[0] == 0.0
    assert _scored(f"```py\n{RIGHT}\n```", setup="import math", tests=("assert add(math.pi, 0) > 3",))[0] == 1.0


def test_problems_of_a_file(tmp_path: Path) -> None:
    rows = [*_rows(240), *_rows(2), {"text": "One.", "code": "x = 1", "test_list": ["assert x == 1\nassert x < 2"]}]
    env = _env(tmp_path, rows, solution="code")
    held_out = env.eval_problems(16)
    trained = env.train_problems(0, 0, 300)
    assert not {problem.id for problem in held_out} & {problem.id for problem in trained}
    (problem,) = {p.id: p for p in (*held_out, *trained) if "Add 7." in str(p.prompt)}.values()
    assert problem.prompt == [
        {
            "role": "user",
            "content": "Add 7.\nYour code must pass these tests:\nassert f(1) == 8\n"
            "Write it in one block of ```python.",
        }
    ]
    assert asyncio.run(problem.reply(problem.answer)).reward == 1.0
    assert check_env(env) == []


def test_wrong_files_and_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'code_of'; it has the columns 'text', 'code', 'test_list'"):
        _env(tmp_path, _rows(20), solution="code_of").eval_problems(1)
    with pytest.raises(ValueError, match=r"row 1: the columns 'text' and 'test_list' must hold a question and its"):
        _env(tmp_path, [*_rows(1), {"text": "One.", "code": "", "test_list": []}]).eval_problems(1)
    with pytest.raises(ValueError, match=r"num_eval is 90, but code problems of .* has only \d+ held-out problems"):
        _env(tmp_path, _rows(20)).eval_problems(90)
    for options, message in (
        ({"template": "Code!"}, r"template is 'Code!'; it must contain \{question\}"),
        ({"time_limit_s": 0.0}, r"time_limit_s is 0.0; it must be at least 0.1"),
        ({"sandbox": "chroot"}, r"sandbox is 'chroot', which is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            CodeProblems(dataset="x", **options)  # type: ignore[arg-type]


def test_the_recipe_has_the_columns_of_mbpp() -> None:
    env = code_qwen3_5_gpu.recipe().env
    assert isinstance(env, CodeProblems)
    columns = (env.question, env.tests, env.setup, env.solution)
    assert columns == ("text", "test_list", "test_setup_code", "code")
