import json
import os
import pty
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import run_command
from controller.commands.processes import SAME_SIGNAL_S, STOP_WITHIN_S
from controller.commands.recipes import find_recipe
from controller.commands.show import Runs
from controller.runs.models import resolve_model
from tests.waiting import LIMIT_S, has_ended, wait_for_end, wait_for_line, wait_until

pytestmark = pytest.mark.seconds

RECIPE = Path(__file__).with_name("toy_recipe.py")
ROOT = Path(__file__).parents[3]


def command(*arguments: str) -> list[str]:
    """The command line as a user starts it."""
    return [sys.executable, "-m", "controller.commands.cli", *arguments]


def ownloop(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One finished command, started elsewhere than in the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def add_checkpoint(run: Path) -> None:
    """A complete checkpoint of step 1, of a loop that has no trainers."""
    step = run / "checkpoints" / "step-00001"
    step.mkdir(parents=True)
    (step / "loop.json").write_text('{"step": 1, "trainers": []}')


def start(cwd: Path, mode: str) -> tuple[subprocess.Popen[str], int]:
    """A run that goes on until it is stopped, and the process it started."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = command("run", str(RECIPE), "--name", "a", "--mode", mode)
    pipe = subprocess.PIPE
    process = subprocess.Popen(arguments, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    file = cwd / "runs" / "a" / "pid"
    wait_until(lambda: process.poll() is not None or (file.exists() and file.read_text()), "the run's child")
    assert process.poll() is None
    return process, int(file.read_text())


def test_a_user_without_a_home_directory_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_no_home(monkeypatch)
    monkeypatch.setattr(Runs, "run", lambda _: resolve_model("smollm2-135m-instruct"))
    assert run_command(["runs"]) == 2
    assert "no home directory, for a cache; set HOME" in capsys.readouterr().err


def leave_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name and no HOME."""
    for name in ("HOME", "OWNLOOP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", dict[int, Any]().__getitem__)


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_path_that_is_no_text_is_printed(encoding: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    words = [*map(os.fsencode, command("runs", "--runs")), b"r\xff"]
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"there are no runs in r\\udcff; --runs names another folder\n"


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--num-steps", "7")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["2/7  reward 0.500±nan", "That was all."]
    assert result.stderr == ""
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("toy_recipe-0-")
    assert json.loads((folder / "config.json").read_text())["num_steps"] == 7
    assert "noise from Python" in (folder / "logs" / "controller.log").read_text()
    assert "noise from a child" in (folder / "logs" / "controller.log").read_text()
    assert has_ended(int((folder / "pid").read_text()))


SUBCLASS = """
'''Any machine: the toy loop with a field and a check of its own.'''
from dataclasses import dataclass
from tests.controller.commands.toy_recipe import ToyConfig

@dataclass(frozen=True, slots=True, kw_only=True)
class MineConfig(ToyConfig):
    flavour: str = "plain"

def recipe():
    return MineConfig()
"""


def test_a_recipe_may_define_its_own_configuration(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(SUBCLASS)
    result = ownloop(tmp_path, "run", str(recipe), "--name", "a", "--flavour", "sweet")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "That was all."), result.stderr
    config = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert config.keys() == {"num_steps", "mode", "optimizer", "seed", "flavour"}
    assert config["flavour"] == "sweet"
    recipe.write_text("")
    add_checkpoint(tmp_path / "runs" / "a")
    result = ownloop(tmp_path, "run", "--resume=a", "--num-steps", "3")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "That was all."), result.stderr


def test_a_configuration_without_a_loop_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(SUBCLASS.replace("(ToyConfig)", "").replace('flavour: str = "plain"', "seed: int = 0"))
    result = ownloop(tmp_path, "run", str(recipe))
    assert result.returncode == 2
    assert result.stderr.startswith("error: MineConfig has no method loop(), which returns the function to train with")
    assert not (tmp_path / "runs").exists()


def test_a_crash_is_short_on_screen_and_whole_in_the_log(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--name", "a", "--mode", "crash")
    assert result.returncode == 1
    assert "error: RuntimeError: boom" in result.stderr
    assert "Traceback" not in result.stderr
    log = tmp_path / "runs" / "a" / "logs" / "controller.log"
    assert str(log) in result.stderr
    assert "Traceback" in log.read_text()
    assert has_ended(int((tmp_path / "runs" / "a" / "pid").read_text()))


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("sleep", signal.SIGINT, 130),
        ("sleep", signal.SIGTERM, 143),
        ("block", signal.SIGINT, 130),
        ("no-cancel", signal.SIGTERM, 143),
    ],
)
@pytest.mark.slow
def test_a_signal_ends_every_process(mode: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    process, child = start(tmp_path, mode)
    # As a terminal does it: the signal goes to the whole process group.
    os.killpg(process.pid, number)
    status, _, errors = wait_for_end(process, "the run")
    assert status == code
    assert STOP_WITHIN_S <= 8, "a user is promised that everything is over within ten seconds"
    assert "interrupted; saved: metrics and rollouts of 1 steps" in errors
    assert has_ended(child)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process, child = start(tmp_path, "no-cancel")
    process.send_signal(signal.SIGINT)
    assert "never" in wait_for_line(process.stdout, "the run to ignore the first signal")
    received = time.monotonic()
    wait_until(lambda: time.monotonic() > received + SAME_SIGNAL_S, "the second signal to be another one")
    process.send_signal(signal.SIGINT)
    status, _, errors = wait_for_end(process, "the run")
    assert status == 130
    assert "saved" in errors
    assert has_ended(child)


@pytest.mark.stranger("F5")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", str(RECIPE), "--optimizer.lr", "3"), "error: unknown option --optimizer.lr"),
        (("run", str(RECIPE), "--optimizer.learning-rate", "nan"), "error: Optimizer.learning_rate is nan; it must be"),
        (("run", str(RECIPE), "--optimizer.learning-rate=-1"), "error: Optimizer.learning_rate is -1.0; it must be"),
        (("run", str(RECIPE), "surplus"), "error: unexpected argument surplus"),
        (
            ("run", str(RECIPE), "--optimizer", "x"),
            "error: --optimizer is no option itself; see --optimizer.FIELD in --help, or set it in a recipe",
        ),
        (("run", "grpo_smollm2_cpu", "--lora", "null"), "error: --lora is no option itself; see --lora.FIELD in"),
        (
            ("run", "grpo_smollm2_cpu", "--trainer.compile", "true"),
            "error: --trainer.compile takes no value; 'true' was",
        ),
        (("run", str(RECIPE), "--optimizer.learning-rate", "a"), "error: --optimizer.learning-rate takes FLOAT: "),
        (("run", "--num-steps", "3", str(RECIPE)), "error: --num-steps comes too early, or is not known: see"),
        (("chat", "--top-p", "3"), "error: --top-p comes too early, or is not known: see ownloop chat --help"),
        (("run",), "error: RECIPE is missing: a name that `ownloop list` shows, or"),
        (
            ("run", str(RECIPE), "--replay", "gone"),
            "error: --replay is for loops that sample rollouts; ToyConfig has no",
        ),
        (
            ("run", "accumulate_smollm2_cpu", "--replay", "gone"),
            "error: the recording ",
        ),
        (("show", "runs/gone"), "error: runs/gone is neither a recipe's file, which ends in .py, nor a run"),
        (("export", "a", "--to", "b"), "error: there is no run a: no config.json in a or runs/a"),
        (("chat", "smollm2"), "error: model 'smollm2' is neither a local directory nor a known name"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...],
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_command(arguments) == 2
    errors = capfd.readouterr().err
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1
    assert not list(here.iterdir())


QUICK: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--help",), 0, "usage"),
    (("list",), 0, "grpo_smollm2_cpu"),
    (("show", str(RECIPE)), 0, "num_steps"),
    (("run", "grpo_smollm2_cpu", "--help"), 0, "--num-steps"),
    (("run", "grpo_smollm2_cpu", "--num-steps", "x"), 2, "--num-steps takes INT"),
    (("chat", "nosuch", "--temperature", "-1"), 2, "temperature is -1"),
    (("chat", "nosuch"), 2, "model 'nosuch' is neither"),
)
"""Arguments, exit status, and what is printed."""
_QUICK = """
import json, sys
from controller.commands.cli import main

for arguments, status, _ in json.loads(sys.argv[1]):
    try: main(arguments)
    except SystemExit as stop: assert stop.code == status, stop
    assert not {'torch', 'monarch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules), arguments
    print(end='\\0', flush=True)
"""


@pytest.mark.stranger("F5")
def test_help_and_mistakes_do_not_load_the_stack() -> None:
    assert_quick(QUICK)


def assert_quick(rows: Sequence[tuple[tuple[str, ...], int, str]]) -> None:
    """Commands end with their status, and print their text, without loading what takes seconds."""
    command, pipe = [sys.executable, "-c", _QUICK, json.dumps(rows)], subprocess.PIPE
    run = subprocess.run(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == 0, run.stdout
    for (arguments, _, message), printed in zip(rows, run.stdout.removesuffix("\0").split("\0"), strict=True):
        assert message in printed, arguments


def test_show_prints_the_overridden_configuration(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "show", str(RECIPE), "--optimizer.learning_rate=0.5", "--num-steps", "9")
    expected = {"num_steps": 9, "mode": "finish", "optimizer": {"learning_rate": 0.5}, "seed": 0}
    assert json.loads(result.stdout) == expected


@pytest.mark.parametrize(
    "arguments", [("--help",), ("list",), ("show", str(RECIPE)), ("run", str(RECIPE), "--help"), ("run", str(RECIPE))]
)
def test_a_reader_that_goes_away_ends_it_quietly(arguments: tuple[str, ...], tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # else argparse hides that nobody reads
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*arguments), cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        status, _, errors = wait_for_end(process, f"ownloop {arguments[0]}")
    assert status == 128 + signal.SIGPIPE
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    # A run says where it got to.
    assert ("the output is not read any more" in errors) == ((tmp_path / "runs").exists())


def test_every_recipe_says_what_it_is_for(tmp_path: Path) -> None:
    lines = ownloop(tmp_path, "list").stdout.splitlines()
    for line in lines:
        name, _, description = line.partition("  ")
        assert description.strip(), f"{name} has no docstring"
        assert find_recipe(name).is_file()


def test_a_terminal_gets_a_live_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        command("run", str(RECIPE), "--name", "a"), cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], LIMIT_S)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(timeout=LIMIT_S) == 0
    os.close(ours)
    text = shown.decode()
    assert "\x1b[" in text
    assert "That was all." in text
    assert "noise" not in text
