"""Code runs, and its limits hold, in every kind of sandbox and without one."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from ownloop_sandbox import Sandbox, SandboxResult, run_python
from plugins.sandbox.tests.here import REAL, need
from tests.waiting import LIMIT_S, until, wait_until

pytestmark = pytest.mark.seconds

Run = Callable[..., Awaitable[SandboxResult]]


@pytest.fixture(params=(*REAL, "none"))
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    need(request.param)
    return request.param


def run(sandbox: Sandbox, code: str, time_limit_s: float = LIMIT_S) -> SandboxResult:
    return asyncio.run(run_python(code, sandbox=sandbox, time_limit_s=time_limit_s))


def run_all(sandbox: Sandbox, codes: Sequence[str]) -> list[SandboxResult]:
    async def main() -> list[SandboxResult]:
        return await asyncio.gather(*(run_python(code, sandbox=sandbox, time_limit_s=LIMIT_S) for code in codes))

    return asyncio.run(main())


def test_code_runs(sandbox: Sandbox) -> None:
    code = "import math, statistics\nprint(math.factorial(10), 'é', __name__)"
    assert run(sandbox, code) == SandboxResult(output="3628800 é __main__", ok=True)


def test_a_strict_umask_changes_nothing(sandbox: Sandbox) -> None:
    before = os.umask(0o077)
    try:
        assert run(sandbox, "open('x', 'w').write('a')\nprint(open('x').read())") == SandboxResult(output="a", ok=True)
    finally:
        os.umask(before)


def test_code_may_use_its_scratch_folder(sandbox: Sandbox) -> None:
    code = "import tempfile\nopen('x', 'w').write('a' * 1000)\nwith tempfile.TemporaryFile() as f: f.write(b'b')"
    assert run(sandbox, code + "\nprint(len(open('x').read()))") == SandboxResult(output="1000", ok=True)


def test_code_may_start_processes_and_threads(sandbox: Sandbox) -> None:
    code = (
        "import subprocess, threading\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "print(subprocess.run(['/bin/echo', 'process'], capture_output=True, text=True).stdout.strip())"
    )
    assert run(sandbox, code) == SandboxResult(output="thread\nprocess", ok=True)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("(", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("print(input())", "EOFError: EOF when reading a line"),
        ("\ud800", "SyntaxError"),
        ("open('x', 'w').write('a' * 10**8)", "OSError: [Errno 27] File too large"),
    ],
)
def test_code_that_fails_says_why(sandbox: Sandbox, code: str, output: str) -> None:
    result = run(sandbox, code)
    assert not result.ok
    assert result.output.startswith(output) or "No space left" in result.output, result


@pytest.mark.stranger("F2")
@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "raise SystemExit", "exit()", "import os\nos._exit(0)"])
def test_an_end_with_status_0_is_a_success(sandbox: Sandbox, code: str) -> None:
    assert run(sandbox, f"print(1, flush=True)\n{code}") == SandboxResult(output="1", ok=True)


def test_code_is_the_main_module_without_arguments(sandbox: Sandbox) -> None:
    code = (
        "import os, pickle, sys\nclass A: pass\n"
        "assert type(pickle.loads(pickle.dumps(A()))) is A\nprint(sys.argv, dict(os.environ))"
    )
    assert run(sandbox, code) == SandboxResult(output="['-c'] {}", ok=True)


START = {
    "processes": "import os, time\ndef start():\n    if os.fork() == 0: time.sleep(600)\n",
    "threads": "import os, threading, time\n"
    "def start(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
}


@pytest.mark.stranger("F2")
@pytest.mark.parametrize("limit", [0, 1, 8])
@pytest.mark.parametrize("kind", START)
@pytest.mark.parametrize("sandbox", REAL)
def test_code_may_start_as_many_as_the_option_says(sandbox: Sandbox, kind: str, limit: int) -> None:
    need(sandbox)
    code = START[kind] + "n = 0\ntry:\n    while n < 99: start(); n += 1\nexcept Exception: os.write(1, b'%d' % n)\n"
    call = run_python(code + "os._exit(0)", sandbox=sandbox, time_limit_s=LIMIT_S, max_processes=limit)
    assert asyncio.run(call) == SandboxResult(output=str(limit), ok=True)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "10 ** 10 ** 10"])
def test_time_is_limited(sandbox: Sandbox, code: str) -> None:
    for limit_s in (0.3, 3.0, 30.0):  # a busy host may need longer to get as far as the code's first line
        result = run(sandbox, f"print('on', flush=True)\n{code}", time_limit_s=limit_s)
        if result.output.startswith("on"):
            break
    assert result == SandboxResult(output=f"on\nTimeoutError: over {limit_s:g} s", ok=False)


@pytest.mark.parametrize("code", ["x = []\nwhile True: x.append(bytearray(1 << 20))", "x = 'a' * (1 << 40)"])
def test_memory_is_limited(sandbox: Sandbox, code: str) -> None:
    assert run(sandbox, code) == SandboxResult(output="MemoryError: ", ok=False)


def test_endless_output_is_cut_off(sandbox: Sandbox) -> None:
    # Several, because the amount left in a pipe after a kill differs.
    for result in run_all(sandbox, ["while True: print('x' * 1000)"] * 10):
        assert len(result.output) == 4096 + 3
        assert not result.ok


def test_waiting_for_a_core_does_not_count(sandbox: Sandbox) -> None:
    async def output_behind_others(limit_s: float) -> str:
        """Of code that waits twice as long as it may take."""
        sleep = "import time; time.sleep(600)"
        others = [
            run_python(sleep, sandbox=sandbox, time_limit_s=2 * limit_s) for _ in range(2 * (os.cpu_count() or 1))
        ]
        *_, last = await asyncio.gather(*others, run_python("print(1)", sandbox=sandbox, time_limit_s=limit_s))
        return last.output

    # On a busy host even this code may need longer than the first limit.
    assert any(asyncio.run(output_behind_others(limit_s)) == "1" for limit_s in (1, 4, 16))


@pytest.mark.parametrize("sandbox", REAL)
def test_nothing_outlives_a_cancelled_call(sandbox: Sandbox) -> None:
    need(sandbox)
    seconds = f"600{time.time_ns()}"

    async def give_up() -> None:
        code = f"import subprocess\nsubprocess.run(['/bin/sleep', '{seconds}'])"
        call = asyncio.create_task(run_python(code, sandbox=sandbox, time_limit_s=600))
        await until(lambda: is_running(seconds), "the code to start its process", every_s=0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(give_up())
    wait_until(lambda: not is_running(seconds), "the process to end")


def is_running(argument: str) -> bool:
    """Whether a process of this host has that argument."""
    return any(argument in line for line in map(_command_line, Path("/proc").glob("[0-9]*")))


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
