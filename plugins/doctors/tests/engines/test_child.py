"""A process in another environment: its results and errors arrive, and it ends when whoever started it does."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.engines.mindspore_engine.child import Child, ChildError
from tests.waiting import LIMIT_S, children, wait_until

ROOT = Path(__file__).parents[4]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SERVING = """
import os, time
from examples.engines.mindspore_engine.child import serve

def refuse(value):
    raise ValueError(f"value is {value}; it must be 3")

def fail():
    raise ArithmeticError("my own mistake")

def die():
    print("no memory is left", flush=True)
    os._exit(3)

serve({"double": lambda value: 2 * value, "refuse": refuse, "fail": fail, "die": die, "pid": os.getpid})
"""
STARTING = """
import sys
from examples.engines.mindspore_engine.child import Child
child = Child([sys.executable, "-c", sys.argv[1]], {"PYTHONPATH": sys.argv[2]}, 120)
print(child.pid, flush=True)
child.call("sleep")
"""
SLEEPING = """
import time
from examples.engines.mindspore_engine.child import serve
serve({"sleep": lambda: time.sleep(60)})
"""


def start(script: str, start_timeout_s: float = LIMIT_S) -> Child:
    return Child([sys.executable, "-c", script], ENV, start_timeout_s)


@pytest.fixture
def child() -> Iterator[Child]:
    child = start(SERVING)
    yield child
    child.close()


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody has waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_results_and_errors_arrive_and_the_child_goes_on(child: Child) -> None:
    assert child.call("pid") == child.pid != os.getpid()
    with pytest.raises(ValueError, match=r"^value is 4; it must be 3$"):
        child.call("refuse", 4)
    with pytest.raises(ChildError, match=r"(?s)in fail\n.*ArithmeticError: my own mistake"):
        child.call("fail")
    with pytest.raises(ChildError, match="KeyError: 'triple'"):
        child.call("triple", 3)
    assert child.call("double", [1]) == [1, 1]


def test_a_call_that_cannot_be_sent_ends_the_child(child: Child) -> None:
    with pytest.raises((AttributeError, TypeError)):  # which one is up to pickle
        child.call("double", lambda: 3)
    assert not runs(child.pid)


def test_a_child_that_dies_says_what_it_printed(child: Child) -> None:
    with pytest.raises(ChildError, match=r"(?s)the child ended; exit status: 3; .*no memory is left"):
        child.call("die")
    with pytest.raises(ChildError, match="an earlier call says why"):
        child.call("double", 3)


def test_a_child_that_cannot_start_says_why() -> None:
    with pytest.raises(ChildError, match=r"(?s)exit status: 1; .*No module named 'no_such_module'"):
        start("import no_such_module")


def test_a_child_that_does_not_start_in_time_is_ended() -> None:
    script = "import time; time.sleep(61.25)"
    with pytest.raises(ChildError, match=re.escape("did not start within 0.2 s and was killed; exit status: -9")):
        start(script, start_timeout_s=0.2)
    assert not children(script)


def test_a_child_that_nobody_needs_ends() -> None:
    child = start(SERVING)
    pid = child.pid
    assert runs(pid)
    del child
    gc.collect()
    assert not runs(pid)


def test_a_child_in_a_call_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", STARTING, SLEEPING, str(ROOT)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    wait_until(lambda: not runs(pid), "the child to end")
