"""Files and programs that solve nothing are not paid, by `Repair` and by `Command`; honest ones are.

What cannot be told apart is tested too, and on docs/safety.md by name.
"""

import asyncio
import sys
from ast import literal_eval
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, cast

import pytest

from ownloop_agents import programs
from ownloop_agents.programs import AgentTask, Attempt, Calls, Command, Program, Reward, RewardFile
from ownloop_agents.repair import Repair
from ownloop_sandbox.sandboxes import Box, Work
from plugins.sandbox.tests.here import in_a_box, need_box

pytestmark = [pytest.mark.seconds, pytest.mark.stranger("2.A4")]
PYTHON = sys.executable
PROGRAM = Program(argv=["true"], sandbox="auto")


@pytest.fixture(autouse=True)
def boxed() -> None:
    need_box("auto")


def left(files: Mapping[str, str]) -> Work:
    work = Work()
    for name, text in files.items():
        work.add({"name": name, "mode": 0o644, "size": len(text.encode())}, text.encode())
    return work


def earned(reward: Reward, task: AgentTask, work: Work, program: Program = PROGRAM) -> float:
    """What an attempt earns that left this work."""
    run = partial(vars(programs)["_in_a_fresh_sandbox"], program, task, work)
    attempt = Attempt(exit_code=0, output="", calls=(), run=run)
    return asyncio.run(cast(Any, reward)(task, work, attempt))


def played(code: str, task: AgentTask) -> Work:
    """What a program leaves that runs this code, when all of its processes are gone."""

    async def use(box: Box) -> Work:
        for name, content in task.files.items():
            await box.put(name, content)
        await box.run([PYTHON, "-c", code], {}, 60)
        await box.stop()
        return await box.files()

    return asyncio.run(in_a_box("auto", PROGRAM.box_config(), use))


REPAIRS = {
    "end at once": "import sys; sys.exit(0)",
    "end without a word": "import os; os._exit(0)",
    "end in the function": "import os\ndef {name}(*a): os._exit(0)",
    "raise SystemExit": "def {name}(*a): raise SystemExit",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "fork and end": "import os\nif os.fork(): os._exit(0)",
    "equal to all": "class All:\n    def __eq__(self, o): return True\ndef {name}(*a): return All()",
    "an odd int": "class All(int):\n    def __eq__(self, o): return True\ndef {name}(*a): return All(77)",
    "true": "def {name}(*a): return True",
    "print a lot": "def {name}(*a): print('[5, 8]' * 99)",
    "print values": "import os\nos.write(1, b'[null, null]'); os._exit(0)",
    "the caller's frame": "import sys\ndef {name}(*a):\n    f = sys._getframe(1)\n    return f.f_locals.get('x')",
    "find what is expected": "import gc\ndef {name}(*a):\n"
    "    return [o for o in gc.get_objects() if isinstance(o, dict) and 'answer' in o] or None",
    "read the tests": "import glob\ndef {name}(*a): return [open(f).read() for f in glob.glob('/program/*')]",
    "not JSON": "def {name}(*a): return object()",
    "endless": "def {name}(*a):\n    x = []\n    x.append(x)\n    return x",
    "deep": "def {name}(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "a syntax error": "def (",
    "nothing": "",
}


@pytest.mark.parametrize("name", REPAIRS)
def test_no_file_that_repairs_nothing_is_paid(name: str) -> None:
    env = Repair(program=PROGRAM)
    (task,) = [task for task in env.train_problems(0, 0, 40) if task.answer[0] == "total"][:1]
    work = left({"work.py": REPAIRS[name].replace("{name}", "total")})
    assert earned(env.reward, task, work) == 0
    assert earned(env.reward, task, left({"work.py": str(task.files["work.py"])})) == 0


def test_a_repair_is_paid() -> None:
    env = Repair(program=PROGRAM)
    source = "def total(a, b):\n    print('x')\n    return a + b\n"
    (task,) = [task for task in env.train_problems(0, 0, 40) if task.answer[0] == "total"][:1]
    assert earned(env.reward, task, left({"work.py": source})) == 1
    values = [((), value) for value in ({"a": [1, 2.5]}, None, "é", True)]
    for given, value in values:
        work = left({"w.py": f"def f(): return {value!r}"})
        assert earned(Calls("w.py", "f", [(given, value)]), AgentTask(id="t", kept=("w.py",)), work) == 1
        assert earned(Calls("w.py", "f", [(given, 1)]), AgentTask(id="t", kept=("w.py",)), work) == 0


def test_a_call_finds_the_files_of_the_work() -> None:
    work = left(
        {
            "src/w.py": "\ufefffrom __future__ import annotations\nfrom dataclasses import dataclass\n"
            "from near import two\n"
            "@dataclass\nclass A:\n    x: int\ndef f(n): return [A(two(n)).x, __file__[-4:], __name__]\n",
            "src/near.py": "def two(n): return 2 * n\n",
        }
    )
    for expected in (6, 7):
        reward = Calls("src/w.py", "f", [((3,), [expected, "w.py", "w"])])
        assert earned(reward, AgentTask(id="t", kept=("src/",)), work) == (expected == 6)


@pytest.mark.parametrize("value", [float("nan"), "x" * 40_000, {1}])
def test_a_call_is_not_asked_for_what_cannot_be_compared(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Calls("w.py", "f", [((), value)])


CHECK = "from sums import add\nfor a, b in ((1, 2), (3, 4)):\n    assert add(a, b) == a + b\n"
TESTS = "import sums\ndef test_one(): assert sums.add(1, 2) == 3\ndef test_two(): assert sums.add(3, 4) == 7\n"
CASES = (
    "import unittest, sums\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(sums.add(1, 2), 3)\n"
)
RIGHT = "def add(a, b): return a + b\n"
HIDDEN = {"check.py": CHECK, "tests/test_sums.py": TESTS, "test_cases.py": CASES}
TASK = AgentTask(id="t", files={"sums.py": "def add(a, b): return a - b\n"}, hidden=HIDDEN)
COMMANDS = {
    "script": Command(["python3", "check.py"]),
    "options": Command(["python3", "-B", "-W", "ignore", "check.py"]),
    "code": Command(["python3", "-c", "import runpy; runpy.run_path('check.py')"]),
    "pytest": Command([PYTHON, "-m", "pytest", "-q", "--disable-plugin-autoload", "tests/test_sums.py"]),
    "unittest": Command(["python3", "-m", "unittest", "test_cases"]),
}
WORKS = {
    "end at once": "import sys; sys.exit(0)",
    "end without a word": "import os; os._exit(0)",
    "end in the function": "import os\ndef add(a, b): os._exit(0)",
    "claim that it cannot run": "import os\ndef add(a, b): os._exit(127)",
    "claim to be asked wrongly": "import os\ndef add(a, b): os._exit(4)",
    "raise SystemExit": "def add(a, b): raise SystemExit(0)",
    "print and end": "import os\ndef add(a, b):\n    os.write(1, b'2 passed in 0.01s\\nOK\\n'); os._exit(0)",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "fork and end": "import os\nif os.fork(): os._exit(0)",
    "a hook for errors": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): return 0",
    "at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "a thread ends it": "import os, threading, time\nthreading.Timer(0.05, os._exit, (0,)).start()\n"
    "def add(a, b): time.sleep(9)",
    "a signal ends it": "import os, signal\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.05)\n"
    "import time\ndef add(a, b): time.sleep(9)",
    "skip the test": "import unittest\ntry: import pytest; skip = pytest.skip\nexcept ImportError: pytest = None\n"
    "def add(a, b):\n    if pytest: skip('x')\n    raise unittest.SkipTest('x')",
    "skip the module": "import unittest\ntry: import pytest\nexcept ImportError: raise unittest.SkipTest('x')\n"
    "pytest.skip('x', allow_module_level=True)",
    "expect a failure": "import pytest\ndef add(a, b): pytest.xfail('x')",
    "leave pytest": "import pytest\ndef add(a, b): pytest.exit('x', returncode=0)",
    "leave pytest at once": "import pytest\npytest.exit('x', returncode=0)",
    "nothing": "",
}


OF_PYTEST = ("end in the function", "claim to be asked wrongly", "print and end", "at the end", *list(WORKS)[-7:])


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("script", WORKS),
        pytest.param("pytest", OF_PYTEST, id="pytest"),
        *(pytest.param(c, WORKS, id=f"{c}-all", marks=pytest.mark.slow) for c in list(COMMANDS)[1:]),
    ],
)
async def test_no_work_that_solves_nothing_is_paid(command: str, names: Collection[str]) -> None:
    limit = asyncio.Semaphore(2)

    async def one(text: str) -> float:
        async with limit:
            work = left({"sums.py": text})
            run = partial(vars(programs)["_in_a_fresh_sandbox"], PROGRAM, TASK, work)
            return await COMMANDS[command](TASK, work, Attempt(exit_code=0, output="", calls=(), run=run))

    earned = await asyncio.gather(*(one(WORKS[name]) for name in names), one(RIGHT))
    assert dict(zip([*names, "right"], earned, strict=True)) == {**dict.fromkeys(names, 0.0), "right": 1.0}


PLANTED = {
    "conftest.py": "def pytest_collection_modifyitems(items): items.clear()",
    "tests/conftest.py": "import os; os._exit(0)",
    "pytest.ini": "[pytest]\naddopts = --co",
    "tests/test_sums.py": "def test(): pass",
    "check.py": "",
    "sitecustomize.py": "import os; os._exit(0)",
    "json.py": "import os; os._exit(0)",
    "runpy.py": "import os; os._exit(0)",
    "pytest.py": "import sys; sys.exit(0)",
    "x.pth": "import os; os._exit(0)",
}


@pytest.mark.parametrize("kept", [(), ("./",)])
@pytest.mark.parametrize("command", ["script", "pytest", "unittest"])
def test_planted_files_are_not_paid(command: str, kept: tuple[str, ...]) -> None:
    task = AgentTask(id="t", files=TASK.files, hidden=HIDDEN, kept=kept)
    work = left({**PLANTED, "sums.py": "def add(a, b): return 0"})
    assert earned(COMMANDS[command], task, work) == 0
    if not kept:
        assert earned(COMMANDS[command], task, left({**PLANTED, "sums.py": RIGHT})) == 1


def test_what_takes_a_tests_place_is_not_copied() -> None:
    planted = (
        "test_cases/__init__.py",
        "test_cases.so",
        "a/__pycache__/x.pyc",
        "x.pyc",
        ".pytest.toml",
        "b/conftest.py",
    )
    names = ("sums.py", "new/x.py", "test_cases_of_mine.py")
    hidden = {**HIDDEN, "test_helper.py": ""}
    work = left(dict.fromkeys((*planted, *names), ""))
    for kept, seen in (("./",), names), (("new/", "x.pyc"), names[:2]), ((), names[:1]):
        task = AgentTask(id="t", files=TASK.files, hidden=hidden, kept=kept)
        code = "import os; print(sorted(f'{d}/{n}'[2:] for d, _, f in os.walk('.') for n in f))"
        run = vars(programs)["_in_a_fresh_sandbox"](PROGRAM, task, work, ["python3", "-c", code], 60.0)
        assert literal_eval(asyncio.run(run).output) == sorted({*seen, *hidden})


PROGRAMS = {
    "outlive the program": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    while True:\n        open('check.py', 'w').write(''); time.sleep(0.01)\n",
    "a folder in place of the tests": "import os\nos.makedirs('check.py/x')",
    "a fifo in place of the tests": "import os\nos.mkfifo('check.py')",
    "a link in place of the tests": "import os\nos.symlink('/dev/null', 'check.py')",
    "a fifo in place of the work": "import os\nos.unlink('sums.py'); os.mkfifo('sums.py')",
    "a folder in place of the work": "import os\nos.unlink('sums.py'); os.mkdir('sums.py')",
    "a home of its own": "import os\nos.makedirs('.local/bin'); open('.local/bin/python3', 'w').write('#!/bin/sh')\n"
    "os.chmod('.local/bin/python3', 0o755); open('.bashrc', 'w').write('exit 0')",
    "three thousand folders": "import os\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')",
}


@pytest.mark.stranger("2.A10")
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_that_spoils_its_folder_is_paid(name: str) -> None:
    assert earned(COMMANDS["script"], TASK, played(PROGRAMS[name], TASK)) == 0
    right = f"{PROGRAMS[name]}\n" if "in place of the work" not in name else ""
    spoilt = f"open('sums.py', 'w').write({RIGHT!r})\n{right}"
    assert earned(COMMANDS["script"], TASK, played(spoilt, TASK)) == 1


def test_what_cannot_be_told_apart_is_known() -> None:
    assert earned(COMMANDS["script"], TASK, left({"sums.py": REPAIRS["equal to all"].replace("{name}", "add")})) == 1
    # any other command: its status is all that is known
    assert earned(Command(["sh", "-c", "python3 check.py"]), TASK, left({"sums.py": WORKS["end at once"]})) == 1


@pytest.mark.stranger("2.B2")
@pytest.mark.parametrize(
    "argv",
    [
        *(["nosuchinterpreter", "x"], ["python3", "absent.py"], ["python3", "-m", "absent"], ["python9", "check.py"]),
        *(["sh", "-c", "nosuchinterpreter x"], ["sh", "-c", "./sums.py"], [PYTHON, "-m", "pytest", "absent.py"]),
    ],
)
def test_a_command_that_cannot_be_started_is_no_reward(argv: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be started|No such file"):
        earned(Command(argv), TASK, left({"sums.py": RIGHT}))


@pytest.mark.stranger("2.A2")
@pytest.mark.stranger("2.A3")
@pytest.mark.parametrize("code", ["os.mkfifo('r')", "os.symlink('/proc/self/environ', 'r')", "os.mkdir('r')", "0"])
def test_a_reward_that_is_no_regular_file_is_a_failure_without_its_content(code: str) -> None:
    task = AgentTask(id="t")
    with pytest.raises(FileNotFoundError, match="the program left no regular file 'r'"):
        earned(RewardFile("r"), task, played(f"import os\n{code}", task))
    assert earned(RewardFile("r"), task, played("open('r', 'w').write('0.5')", task)) == 0.5


def test_a_grader_has_another_home_and_no_network() -> None:
    code = (
        "import os, socket\nassert os.environ['HOME'] != os.getcwd() and not os.listdir(os.environ['HOME'])\n"
        "try: socket.create_connection(('127.0.0.1', 8399), 1)\nexcept OSError: pass\nelse: assert 0"
    )
    assert earned(Command(["python3", "-c", code]), TASK, left({})) == 1
