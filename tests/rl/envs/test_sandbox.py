import asyncio
import os
import subprocess
import time

import pytest

from rl.envs.sandbox import SandboxResult, run_python


def _run(code: str, time_limit_s: float = 5.0) -> SandboxResult:
    return asyncio.run(run_python(code, time_limit_s=time_limit_s))


def test_code_runs() -> None:
    assert _run("import math\nprint(math.factorial(10), 'é')") == SandboxResult(output="3628800 é", ok=True)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("(", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("\ud800", "UnicodeDecodeError|SyntaxError|NameError"),
        ("open('x', 'w').write('a' * 10**8)", "File too large|OSError"),
    ],
)
def test_code_that_fails_says_why(code: str, output: str) -> None:
    result = _run(code)
    assert not result.ok
    assert any(part in result.output for part in output.split("|")), result


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "10 ** 10 ** 10", "input()"])
def test_time_is_limited(code: str) -> None:
    start = time.monotonic()
    result = _run(f"print('on', flush=True)\n{code}", time_limit_s=1.0)
    assert time.monotonic() - start < 5
    expected = "on\nEOFError: EOF when reading a line" if code == "input()" else "on\nTimeoutError: over 1 s"
    assert result == SandboxResult(output=expected, ok=False)


FORKS = [
    "import os\nwhile True: os.fork()",
    "import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
    "import os\nos.system('sleep 60')",
    "import os\nos.execv('/bin/sleep', ['sleep', '60'])",
    "import subprocess\nsubprocess.run(['sleep', '60'], start_new_session=True)",
    "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()",
    "import ctypes\nctypes.CDLL(None).fork()",
    "import _posixsubprocess",
]


@pytest.mark.parametrize("code", FORKS)
def test_no_process_is_started(code: str) -> None:
    result = _run(code)
    assert not result.ok
    assert result.output == "PermissionError: no other process may be started here"


@pytest.mark.parametrize("code", ["x = []\nwhile True: x.append(bytearray(1 << 20))", "x = 'a' * (1 << 40)"])
def test_memory_is_limited(code: str) -> None:
    assert _run(code) == SandboxResult(output="MemoryError: ", ok=False)


def test_what_runs_outlives_nobody() -> None:
    """The process is killed if the caller is cancelled."""

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_python(f"import time  # {marker}\ntime.sleep(60)", time_limit_s=50), 0.5)

    marker = f"{time.time():.4f}"
    asyncio.run(give_up())
    assert f"# {marker}" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_waiting_for_a_core_does_not_count() -> None:
    async def all_of_them() -> list[SandboxResult]:
        codes = ["import time; time.sleep(0.3)"] * (8 * (os.cpu_count() or 1))
        return await asyncio.gather(*(run_python(code, time_limit_s=1.0) for code in codes))

    assert all(result.ok for result in asyncio.run(all_of_them()))


def test_endless_output_is_cut_off() -> None:
    async def some() -> list[SandboxResult]:  # several, because the amount left in a pipe after a kill differs
        return await asyncio.gather(*(run_python("while True: print('x' * 1000)") for _ in range(40)))

    for result in asyncio.run(some()):
        assert len(result.output) == 4096 + 3
        assert not result.ok


def test_several_run_at_the_same_time() -> None:
    async def all_of_them() -> list[SandboxResult]:
        return await asyncio.gather(*(run_python(f"import time; time.sleep(0.3); print({i})") for i in range(8)))

    assert [result.output for result in asyncio.run(all_of_them())] == [str(i) for i in range(8)]
