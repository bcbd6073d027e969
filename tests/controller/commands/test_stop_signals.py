"""Signals to the process that runs a loop."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.controller.commands.test_cli import RECIPE, ROOT, command
from tests.waiting import LIMIT_S, has_ended, wait_for_end, wait_until

pytestmark = pytest.mark.seconds

# Sends itself a signal while a loop runs that then saves for some seconds, and further signals meanwhile. Its deadlines
# never come, except where a test is about them.
SAVING = """
import asyncio, json, os, signal, sys
from controller.commands.processes import StopSignals
options, saving = json.loads(sys.argv[1]), False

async def loop():
    global saving
    for number in options["signals"]:
        os.kill(os.getpid(), number)
    try:
        await asyncio.sleep(options["runs_s"])
        print("not stopped", flush=True)
    finally:
        saving = options["says_so"]
        await asyncio.sleep(options["seconds"] / 2)
        for number in options["later"]:
            os.kill(os.getpid(), number)
        await asyncio.sleep(options["seconds"] / 2)
        print("saved", flush=True)
        saving = False
        await asyncio.sleep(600 if options["hangs"] else 0)

times = {"stop_within_s": options["stop_within_s"], "same_signal_s": options["same_signal_s"]}
with StopSignals(lambda: print("at once", flush=True), lambda: saving, **times) as stop:
    try:
        stop.run(loop())
    except asyncio.CancelledError:
        sys.exit(128 + stop.received)
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def options(*signals: int, **others: Any) -> str:
    """What the program above does: `later` signals follow after half of the `seconds` of its save."""
    defaults = {"later": (), "seconds": 0.4, "says_so": True, "hangs": False, "runs_s": 600.0}
    return json.dumps({"signals": signals, "stop_within_s": 600.0, "same_signal_s": 600.0, **defaults, **others})


def stopped(what: str) -> tuple[int, list[str]]:
    """The status and the output of the program above."""
    code = [sys.executable, "-c", SAVING, what]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.stderr == ""
    return run.returncode, run.stdout.splitlines()


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_a_run_that_saves_has_longer(number: int) -> None:
    assert stopped(options(number, seconds=2.5, stop_within_s=1.5)) == (128 + number, ["saved"])


def test_a_run_that_is_paused_while_it_saves_has_longer() -> None:
    code = [sys.executable, "-c", SAVING, options(INT, later=(signal.SIGSTOP,), seconds=1.0, stop_within_s=1.5)]
    pipe = subprocess.PIPE
    with subprocess.Popen(code, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        paused = psutil.Process(process.pid)
        wait_until(lambda: paused.status() == psutil.STATUS_STOPPED, "its pause")
        time.sleep(2.0)  # longer than `stop_within_s`
        process.send_signal(signal.SIGCONT)
        assert wait_for_end(process, "the run") == (128 + INT, "saved\n", "")


def test_a_run_that_hangs_does_not_have_longer() -> None:
    assert stopped(options(INT, seconds=600, says_so=False, stop_within_s=1.0)) == (130, ["at once"])
    assert stopped(options(INT, hangs=True, stop_within_s=1.5)) == (130, ["saved", "at once"])  # after its save


def test_a_second_signal_of_a_user_ends_it_at_once() -> None:
    assert stopped(options(INT, later=(INT,), seconds=20, same_signal_s=0.0)) == (130, ["at once"])
    assert stopped(options(INT, TERM)) == (130, ["saved"])  # a wrapper passed the same stop on
    assert stopped(options(HUP, later=(HUP,), same_signal_s=0.0)) == (129, ["saved"])  # the shell's, after the kernel's


def test_a_run_outlives_its_terminal_if_that_was_asked_for() -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    arguments = [sys.executable, "-c", code, sys.executable, "-c", SAVING, options(HUP, runs_s=0.5)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (run.returncode, run.stdout.splitlines()) == (0, ["not stopped", "saved"]), run.stderr


# What a reward does that computes in processes of its own.
FORKING = """
import asyncio, multiprocessing, signal
from controller.commands.processes import StopSignals

def reward():
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]), flush=True)
    hanging = context.Process(target=signal.pause)
    hanging.start()
    hanging.terminate()
    hanging.join()
    print(hanging.exitcode, flush=True)

async def loop():
    reward()
    await asyncio.to_thread(reward)

with StopSignals(lambda: print("at once", flush=True)) as stop:
    stop.run(loop())
    print(stop.received, flush=True)
"""


def test_a_reward_may_end_processes_that_it_forked() -> None:
    code = [sys.executable, "-c", FORKING]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.stdout.splitlines() == ["[1, 2]", str(-TERM)] * 2 + ["None"], run.stderr


def test_a_terminal_that_is_closed_ends_every_process(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["setsid", "--ctty", *command("run", str(RECIPE), "--name", "a", "--mode", "sleep")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen(arguments, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        file = tmp_path / "runs" / "a" / "pid"
        wait_until(lambda: file.exists() and file.read_text(), "the run's child")
        os.close(ours)
        assert process.wait(timeout=LIMIT_S) == 128 + HUP
    assert has_ended(int(file.read_text()))


@pytest.mark.parametrize("name", ["run", "show"])
def test_ctrl_c_while_the_recipe_is_imported(name: str, tmp_path: Path) -> None:
    interrupt_import(name, tmp_path)


def interrupt_import(name: str, tmp_path: Path) -> None:
    """A command that is interrupted while it imports its recipe ends at once and leaves nothing."""
    recipe = tmp_path / "slow.py"
    recipe.write_text("import time\nfrom pathlib import Path\nPath('importing').touch()\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    words = command(name, "slow.py")
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        wait_until((tmp_path / "importing").exists, "the import of the recipe")
        process.send_signal(INT)
        assert wait_for_end(process, f"ownloop {name}") == (130, "", "interrupted\n")
    (tmp_path / "importing").unlink()
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"slow.py"}


def test_a_ctrl_c_that_python_drops_ends_the_command(tmp_path: Path) -> None:
    recipe = tmp_path / "dropped.py"
    recipe.write_text(
        "import signal, time, weakref\n"
        "watched = type('Watched', (), {})()\n"
        "reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del watched\n"
        "time.sleep(600)\n"
    )
    arguments = command("run", str(recipe))
    run = subprocess.run(arguments, check=False, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_at_any_moment_of_the_start_prints_no_traceback(tmp_path: Path) -> None:
    began = time.monotonic()
    runs: dict[float, subprocess.Popen[str]] = {}
    for delay in (0.05, 0.1, 0.2, 0.5, 1.0):
        name = ("--name", f"after-{delay}", "--runs", str(tmp_path))
        arguments = command("run", str(RECIPE), *name, "--mode", "sleep")  # it does not end before its signal
        pipe = subprocess.PIPE
        runs[delay] = subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    for delay, run in runs.items():
        time.sleep(max(0.0, began + delay - time.monotonic()))
        run.send_signal(INT)
    for delay, run in runs.items():
        status, _, errors = wait_for_end(run, f"the run after {delay} s")
        # Before `main` is within its `try`, Python itself prints a traceback, of its own lines and the entry point's.
        ours = set(re.findall(rf'File "{ROOT}/((?:controller|rl)/[^"]*)"', errors))
        assert ours <= {"controller/commands/cli.py"}, (delay, errors)
        assert status in (-INT, 128 + INT, *([1] if "Traceback" in errors else [])), (delay, errors)
