"""Code problems from files, and what answers to them earn."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs import code_grpo_qwen3_5_gpu
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


EQUAL = """class Equal{base}:
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __hash__(self): return 0
    def __contains__(self, item): return True
    def __iter__(self): return iter([self])
    __ne__ = __le__ = __ge__ = __lt__ = __gt__ = __instancecheck__ = __eq__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __abs__ = __round__ = __call__ = __getattr__ = __sub__
"""
BASES = ("", "(int)", "(str)", "(float)", "(tuple)")
FRAMES = """import sys
def add(*arguments):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_globals, frame.f_locals):
            space.update(passed=99, tests=(), test="", names=[], add=None)
        frame = frame.f_back
    return {found}
"""
COLLECTED = """import gc
def add(*arguments):
    for held in gc.get_objects():
        for text in (held.values() if type(held) is dict else held if type(held) in (list, tuple) else ()):
            if type(text) is str and "assert add" + str(arguments)[:-1] in text:
                return int(text.rpartition("==")[2])
"""
MADE_THERE = """import json, sys
def add(*arguments):
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_receive"):
        frame = frame.f_back
    link = frame.f_locals["self"]
    def send(*message):
        link._writer.write(json.dumps(["list", *message]) + chr(10))
        link._writer.flush()
    def done(value):
        send("done", value, ["list", None, None, None], "")
        link.serve()
    def made(*words):
        send("ask", "call", ["list", *words], ["dict"])
        return ["yours", json.loads(link._reader.readline())[2][1]]
    equal = made(["class", ["type"]], "Equal", ["tuple"], ["dict", ["__eq__", ["class", ["bool"]]]])
    done(made(equal))
"""
MADE_BY_AN_ERROR = (
    MADE_THERE.partition("    equal =")[0]
    + """
    made_up = ["error", ["type"], "X", ["tuple", ["class", ["tuple"]]], ["dict", ["__eq__", ["class", ["bool"]]]]]
    done(["error", ["map"], made_up, ["list", ["list"]]])
"""
)
CHEATS = {
    **{
        f"equal to everything {base}": EQUAL.format(base=base) + "def add(*arguments): return Equal()" for base in BASES
    },
    "a class": EQUAL.format(base="").replace("Equal", "add") + "    def __init__(self, *arguments): pass",
    "a meta class": EQUAL.format(base="(type)") + "class add(metaclass=Equal): pass",
    "a class of the tests' process": MADE_THERE,
    "a class made by an error": MADE_BY_AN_ERROR,
    "frames": FRAMES.format(found="None"),
    "the caller's names": FRAMES.format(found="sys._getframe(1).f_locals.get('test', '== 0').split()[-1]"),
    "gc": COLLECTED,
    "exec": "import builtins\nbuiltins.exec = lambda *arguments: None",
    "print": "import builtins\nbuiltins.print = lambda *arguments, **named: None\nbuiltins.str = lambda number: '2'",
    "exceptions": "import builtins\nbuiltins.BaseException = builtins.AssertionError = ()",
    "modules": "import sys, json\nsys.modules['json'].loads = json.dumps = lambda *arguments: True",
    "the server": "import sys\nmain = sys.modules['__main__']\nmain._update = main._passed = lambda *a: 99\n"
    "def add(*arguments): return Ellipsis",
    "the connection": "import os\ndef add(*arguments):\n    for fd in range(3, 30):\n        try: os.write(fd, "
    'b\'["list", "done", true, ["list"], ""]\\n\' * 9)\n        except OSError: pass\n',
    "the output": "import os\nfor fd in (1, 2): os.write(fd, b'2')\nos._exit(0)",
    "an early end": "def add(*arguments): raise SystemExit(0)",
    "ending at once": "import os\ndef add(*arguments): os._exit(0)",
    "exit handlers": "import atexit, os\natexit.register(os.write, 1, b'2')\ndef add(*arguments): pass",
    "killing": "import os, signal\ndef add(*arguments): os.kill(os.getppid(), signal.SIGTERM)",
    "the parent's files": "import os\ndef add(*arguments): return open(f'/proc/{os.getppid()}/cmdline').read()",
    "helpers": EQUAL.format(base="") + "abs = round = sorted = len = set = isclose = Equal()\ndef add(*a): return a",
    "modules of the tests": EQUAL.format(base="") + "math = Equal()\ndef add(*arguments): return 1",
    "a method of the setup": "def add(*arguments):\n    node = Node()\n    node.same = bool\n    return node",
    "a helper of the setup": "def near(*arguments): return True\ndef add(*arguments): return 1",
    "another's name": "def AssertionError(*arguments): pass\ndef add(*arguments): return 1",
}
GRADED = (
    *(*TESTS, "assert abs(add(1, 2) - 3) < 1e-9", "assert add(1, 2) in (3, 4)", "assert 3 in [add(1, 2)]"),
    *("assert near(add(1, 2), 3)", "assert math.isclose(add(1, 2), 3)", "assert isclose(add(1, 2), 3)"),
    *(
        "assert [*add(1, 2)] == [3]",
        "x = Node()\nx.value = 3\nassert isinstance(add(1, 2), Node) and add(1, 2).same(x)",
        "assert {add(1, 2)} == {3}",
        "assert 2 < add(1, 2) < 4",
    ),
)
SETUP = """import math
from math import isclose
def near(one, other): return abs(one - other) < 1e-9
class Node:
    value = 0
    def same(self, other): return self.value == other.value
"""


@pytest.mark.stranger("2.A4")
@pytest.mark.stranger("2.A10")
@pytest.mark.parametrize("cheat", CHEATS)
def test_code_that_solves_nothing_earns_nothing(cheat: str) -> None:
    completion = f"```python\n{CHEATS[cheat]}\n```"
    assert _scored(completion, tests=GRADED, setup=SETUP, partial_credit=True)[0] == 0


ANSWERS = {
    "objects": (
        "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
        "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)\n"
        "    def __eq__(self, other): return self.x == other.x\n    def __add__(self, other): return Stack()",
        "s = Stack()\ns.push(4)\nassert len(s) == 1 and s != Stack() and s + s == Stack() and s.pop() == 4",
        "try: s.pop()\nexcept IndexError: pass\nelse: assert False",
    ),
    "arguments that change": ("def order(x): x.sort()", "x = [3, 1]\norder(x)\nassert x == [1, 3]"),
    "classes of the setup": (
        "def total(t): return t.v + total(t.next) if t else 0\n"
        "def first(t):\n    t.next = None\n    return Node(t.v, t)",
        "t = Node(1, Node(2))\nassert total(t) == 3 and first(t).v == 1 and total(t) == 1",
        "for i in range(1500): t = Node(1, t)\nassert total(t) == 1501",
        "t.next = t\nassert first(t).next.v == 1",
    ),
    "kinds of the setup": (
        "def other(c, p, *, seen):\n    p.x += 1\n    seen.append(c)\n"
        "    return Colour.RED if c is Colour.BLUE else Colour(2)\n"
        "def bad(): raise Bad(1, 2)\ndef pair(p): return Pair(p.a + 1)",
        "p, seen = P(1), []\nassert other(Colour.BLUE, p, seen=seen) is Colour.RED\n"
        "assert p == P(2) and seen == [Colour.BLUE]",
        "try: bad()\nexcept Bad as e: assert e.args == (1,) and e.b == 2\nelse: assert False",
        "assert isinstance(pair(Pair(1)), Pair) and pair(Pair(1)) == Pair(2)",
    ),
    "classes of its own": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        "class B(A): pass",
        "assert A(1).x == 1 and A(1) == A(1) and issubclass(B, A) and not issubclass(A, B) and isinstance(B(1), A)",
    ),
    "dates": (
        "from datetime import *\ndef f(d, days): return [d + timedelta(days), timedelta(days), d.time(), d.date()]",
        "from datetime import *\nd = datetime(2024, 2, 28, 1, 2, 3, 4, timezone(timedelta(hours=1)))\n"
        "assert f(d, 2) == [datetime(2024, 3, 1, 0, 2, 3, 4, timezone.utc), timedelta(2), time(1, 2, 3, 4),"
        " date(2024, 2, 28)]",
    ),
    "functions": ("def call(f, x): return f(x)", "assert call(lambda v: v + 1, 3) == 4", "assert call(str, 3) == '3'"),
    "generators": ("def up(n):\n    yield from range(n)", "assert list(up(3)) == [0, 1, 2]", "assert 1 in up(2)"),
    "errors": (
        "class MyError(KeyError): pass\ndef f(x): raise MyError(x)",
        "try: f(1)\nexcept MyError as e: assert str(e) == '1'\nelse: assert False",
    ),
    "output": (
        "def hi(): print('hi')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: hi()",
        "assert out.getvalue() == 'hi\\n'",
    ),
    "globals": (
        "import math\nn = 0\ndef up():\n    global n\n    n += 1",
        "up()\nassert n == 1 < math.pi",
        "assert n == 1",
    ),
    "names of Python's own": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a function that checks": (RIGHT, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"),
    "the setup's stub": ("def stub(): return 2", "assert stub() == 2"),
    "values": (
        "from collections import *\nfrom decimal import *\nfrom fractions import *\nP = namedtuple('P', 'x y')\n"
        "values = [Decimal('1.50'), {1, 2}, ((), (3,)), Counter('aab'), defaultdict(int, a=1), Fraction(1, 3), 1 + 2j,"
        " b'ab', None, float('inf'), 10**5000, P(1, 2), range(3), deque([1]), {(1, 2): frozenset('a')}, chr(55296)]",
        "from decimal import *\nfrom fractions import *\nassert values == [Decimal('1.5'), {2, 1}, ((), (3,)),"
        " dict(a=2, b=1), dict(a=1), Fraction(2, 6), 1 + 2j, b'ab', None, float('inf'), 10**5000, (1, 2), range(3),"
        " values[13], {(1, 2): {'a'}}, chr(55296)]",
        "assert values[11].y == 2 and [*values[13]] == [1] and values[3].most_common(1) == [('a', 2)]",
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_values_pass_between_the_tests_and_the_code(kind: str) -> None:
    setup = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom enum import Enum\n"
        "from typing import NamedTuple\n@dataclass(slots=True)\nclass P:\n    x: int\n"
        "class Colour(Enum):\n    RED = 1\n    BLUE = 2\nclass Pair(NamedTuple):\n    a: int\n"
        "class Bad(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b\n"
        "class Node:\n    next = None\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
    )
    code, *tests = ANSWERS[kind]
    assert _scored(f"```python\n{code}\n```", tests=tests, setup=f"{setup}def stub(): pass")[1]["tests_passed"] == 1


@pytest.mark.stranger("2.D7")
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
        ("```python\nx = 1", "x = 1\n"),
        ("~~~~\nx = 1\n~~~", "x = 1\n~~~\n"),
        ("```python\nx = (\nNo, again:\n```python\nx = 1\n```", "x = 1\n"),
        ("```sh\nls\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1```\nSo much.", "x = 1\n"),
        ("Here: ```python\nx = 1\n```", "x = 1\n"),
        ("```{.python .numbers}\nx = 1\n`````", "x = 1\n"),
        ('```python\n"""\n```\nf()\n```\n"""\nx = 1\n```\nDone', '"""\n```\nf()\n```\n"""\nx = 1\n'),
        ("```python\n'''\n```python\nf()\n```\n'''\nx = 1\n```", "'''\n```python\nf()\n```\n'''\nx = 1\n"),
        ('```python\nx = """```python\n```\n"""\n```', 'x = """```python\n```\n"""\n'),
        ('```python\nx = "```"  # """\n```\n```sh\nls\n```', 'x = "```"  # """\n'),
        ('```python\n"""Broken\n```\nNo:\n```python\n"""Good"""\n```', '"""Good"""\n'),
        ('```python\n"""Broken\n```\nNo:\n```python\nx = 1\n```', "x = 1\n"),
        ('```python\nx = """Broken\n```\nSo much.', 'x = """Broken\n'),
        ("```json\n{}\n```", ""),
        ("x = 1", ""),
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str, code: str) -> None:
    assert python_of(text) == code


@pytest.mark.stranger("2.B2")
def test_a_grader_that_cannot_run_pays_nothing_and_takes_nothing() -> None:
    for setup in ("import no_such_module", "raise SystemExit(0)", "while True: pass", "x ="):
        with pytest.raises(RuntimeError, match="the setup of problem 'add' did not run: "):
            _scored(f"```python\n{RIGHT}\n```", setup=setup, time_limit_s=2.0)


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


@pytest.mark.stranger("2.D10")
def test_a_question_is_on_one_side_however_it_is_spaced(tmp_path: Path) -> None:
    rows = [{**row, "text": row["text"].replace(" ", gap)} for row in _rows(40) for gap in (" ", "  ", "\n")]
    env = _env(tmp_path, rows)
    assert not {p.tests for p in env.eval_problems(2)} & {p.tests for p in env.train_problems(0, 0, 80)}


@pytest.mark.stranger("2.D4")
@pytest.mark.parametrize(
    "tests", [["assert x", None], {"inputs": [1]}, '["assert f(1) == 2"]', "None", ["assert x", " 'x == 1' "], [1], 1]
)
def test_tests_that_are_no_statements_are_refused(tests: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 20: column 'test_list'"):
        _env(tmp_path, [*_rows(20), {"text": "One.", "test_list": tests}]).eval_problems(1)


def test_wrong_files_and_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'code_of'; it has the columns 'text', 'code', 'test_list'"):
        _env(tmp_path, _rows(20), solution="code_of").eval_problems(1)
    with pytest.raises(ValueError, match=r"row 1: the columns 'text' and 'test_list' must hold a question and its"):
        _env(tmp_path, [*_rows(1), {"text": "One.", "code": "", "test_list": []}]).eval_problems(1)
    with pytest.raises(ValueError, match=r"num_eval is 90, but code problems of .* has only \d+ held-out problems"):
        _env(tmp_path, _rows(20)).eval_problems(90)
    for options, message in (
        ({"template": "Code!"}, r"template is 'Code!'"),
        ({"time_limit_s": 0.0}, r"time_limit_s is 0.0"),
        ({"sandbox": "chroot"}, r"sandbox is 'chroot'"),
    ):
        with pytest.raises(ValueError, match=message):
            CodeProblems(dataset="x", **options)  # type: ignore[arg-type]


def test_the_recipe_has_the_columns_of_mbpp() -> None:
    env = code_grpo_qwen3_5_gpu.recipe().env
    assert isinstance(env, CodeProblems)
    columns = (env.question, env.tests, env.setup, env.solution)
    assert columns == ("text", "test_list", "test_setup_code", "code")
