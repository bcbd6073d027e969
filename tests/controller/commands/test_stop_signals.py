"""Signals to the process that runs a loop."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.controller.commands.test_cli import RECIPE, ROOT, command, is_alive

pytestmark = pytest.mark.seconds

# Sends itself a signal while a loop runs that then saves for some seconds, and further signals meanwhile.
SAVING = """
import asyncio, json, os, signal, sys
from controller.commands import processes
processes._STOP_DEADLINE_S = 1.5
options, saving = json.loads(sys.argv[1]), False

async def loop():
    global saving
    for number in options["signals"]:
        os.kill(os.getpid(), number)
    try:
        await asyncio.sleep(1)
        print("not stopped", flush=True)
    finally:
        saving = options["says_so"]
        await asyncio.sleep(options["seconds"] / 2)
        for number in options["later"]:
            os.kill(os.getpid(), number)
        await asyncio.sleep(options["seconds"] / 2)
        print("saved", flush=True)
        saving = False
        await asyncio.sleep(60 if options["hangs"] else 0)

with processes.StopSignals(lambda: print("at once", flush=True), lambda: saving) as stop:
    try:
        stop.run(loop())
    except asyncio.CancelledError:
        sys.exit(128 + stop.received)
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def options(
    *signals: int, later: tuple[int, ...] = (), seconds: float = 1.4, says_so: bool = True, hangs: bool = False
) -> str:
    """What the program above does: `later` signals follow after half of the `seconds` of its save."""
    return json.dumps({"signals": signals, "later": later, "seconds": seconds, "says_so": says_so, "hangs": hangs})


def stopped(what: str) -> tuple[int, list[str]]:
    """The status and the output of the program above."""
    code = [sys.executable, "-c", SAVING, what]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert run.stderr == ""
    return run.returncode, run.stdout.splitlines()


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_a_run_that_saves_has_longer(number: int) -> None:
    assert stopped(options(number, seconds=2.5)) == (128 + number, ["saved"])


def test_a_run_that_hangs_does_not_have_longer() -> None:
    assert stopped(options(INT, seconds=40, says_so=False)) == (130, ["at once"])
    assert stopped(options(INT, hangs=True)) == (130, ["saved", "at once"])  # after its save


def test_a_second_signal_ends_it_at_once_unless_nobody_asked_for_it() -> None:
    assert stopped(options(INT, later=(INT,), seconds=3)) == (130, ["at once"])
    assert stopped(options(INT, TERM)) == (130, ["saved"])  # a wrapper passed the same stop on
    assert stopped(options(HUP, later=(HUP,))) == (129, ["saved"])  # the shell's, after the kernel's


def test_a_run_outlives_its_terminal_if_that_was_asked_for() -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    arguments = [sys.executable, "-c", code, sys.executable, "-c", SAVING, options(HUP)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, run.stdout.splitlines()) == (0, ["not stopped", "saved"]), run.stderr


def test_a_terminal_that_is_closed_ends_every_process(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["setsid", "--ctty", *command("run", str(RECIPE), "--name", "a", "--mode", "sleep")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen(arguments, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        file, end = tmp_path / "runs" / "a" / "pid", time.monotonic() + 30
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.close(ours)
        assert process.wait(timeout=15) == 128 + HUP
    assert not is_alive(int(file.read_text()))


def test_ctrl_c_while_the_recipe_is_imported(tmp_path: Path) -> None:
    recipe = tmp_path / "slow.py"
    recipe.write_text("import time\nfrom pathlib import Path\nPath('importing').touch()\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    for name in ("run", "parity"):
        with subprocess.Popen(
            command(name, "slow.py"), cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True
        ) as process:
            while not (tmp_path / "importing").exists():
                time.sleep(0.02)
                assert process.poll() is None
            process.send_signal(INT)
            assert process.communicate(timeout=10) == ("", "interrupted\n")
            assert process.returncode == 130
        (tmp_path / "importing").unlink()
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"slow.py"}


def test_ctrl_c_at_any_moment_of_the_start_prints_no_traceback(tmp_path: Path) -> None:
    began = time.monotonic()
    runs: dict[float, subprocess.Popen[str]] = {}
    for delay in (0.05, 0.1, 0.2, 0.5, 1.0):
        arguments = command("run", str(RECIPE), "--name", f"after-{delay}", "--runs", str(tmp_path))
        pipe = subprocess.PIPE
        runs[delay] = subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    for delay, run in runs.items():
        time.sleep(max(0.0, began + delay - time.monotonic()))
        run.send_signal(INT)
    for delay, run in runs.items():
        errors = run.communicate(timeout=30)[1]
        # Before it comes to our first line, Python itself may print a traceback, of lines that are all its own.
        assert f'File "{ROOT / "controller"}' not in errors, (delay, errors)
        assert run.returncode in (-INT, 128 + INT, *([1] if "Traceback" in errors else [])), (delay, errors)
