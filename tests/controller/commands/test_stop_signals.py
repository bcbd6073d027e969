"""Signals to the process that runs a loop."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.controller.commands.test_cli import RECIPE, ROOT, command, is_alive

# Sends itself signals while a loop runs that needs a second to save after it was cancelled.
SAVING = """
import asyncio, os, signal, sys, time
from controller.commands import processes
processes._STOP_DEADLINE_S = 0.4
signals, saving = eval(sys.argv[1]), False

async def loop():
    global saving
    for number, pause_s in signals:
        os.kill(os.getpid(), number)
        time.sleep(pause_s)
    try:
        await asyncio.sleep(0.5)
        print("not stopped", flush=True)
    finally:
        saving = "saving" in sys.argv
        await asyncio.sleep(1)
        print("saved", flush=True)
        saving = False
        await asyncio.sleep(0.2 if "hangs" not in sys.argv else 60)

with processes.StopSignals(lambda: print("at once", flush=True), lambda: saving) as stop:
    try:
        stop.run(loop())
    except asyncio.CancelledError:
        sys.exit(128 + stop.received)
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def stopped(signals: list[tuple[int, float]], *arguments: str) -> tuple[int, list[str]]:
    """The status and the output of the program above, which is sent (signal, seconds until the next) in turn."""
    code = [sys.executable, "-c", SAVING, str([(int(number), pause_s) for number, pause_s in signals]), *arguments]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert run.stderr == ""
    return run.returncode, run.stdout.splitlines()


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_a_run_that_saves_has_longer(number: int) -> None:
    assert stopped([(number, 0)], "saving") == (128 + number, ["saved"])
    assert stopped([(number, 0)]) == (128 + number, ["at once"])


def test_after_its_save_a_run_has_as_long_as_any_other() -> None:
    began = time.monotonic()
    assert stopped([(INT, 0)], "saving", "hangs") == (130, ["saved", "at once"])
    assert time.monotonic() - began < 10


def test_a_second_signal_ends_it_at_once_unless_nobody_asked_for_it() -> None:
    assert stopped([(INT, 0.35), (INT, 0)], "saving") == (130, ["at once"])
    assert stopped([(INT, 0.05), (INT, 0)], "saving") == (130, ["saved"])  # a wrapper passed the same Ctrl-C on
    assert stopped([(HUP, 0.35), (HUP, 0)], "saving") == (129, ["saved"])  # the shell's, after the kernel's
    assert stopped([(TERM, 0.35), (HUP, 0)], "saving") == (143, ["saved"])  # systemd sends both


def test_a_run_outlives_its_terminal_if_that_was_asked_for() -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    arguments = [sys.executable, "-c", code, sys.executable, "-c", SAVING, str([(int(HUP), 0.0)])]
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
        assert process.wait(timeout=7) == 128 + HUP
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
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]
