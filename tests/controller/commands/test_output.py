import os
import subprocess
import sys
from pathlib import Path

CODE = """
import logging, os, sys
from pathlib import Path
from controller.commands.output import CapturedOutput
print("before")
with CapturedOutput() as output:
    print("early")
    os.system("echo early from a child")
    if sys.argv[1] == "raise":
        raise ValueError("x")
    output.move_to(Path("log"))
    print("late")
    print("late error", file=sys.stderr)
    logging.getLogger("library").warning("a warning")
    os.system("echo late from a child >&2")
    print("for the user", file=output.terminal)
print("after")
print("after error", file=sys.stderr)
"""


def run(cwd: Path, mode: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    """The code above in a process of its own, since it is about that process's file descriptors."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    arguments = [sys.executable, "-c", code, mode]
    return subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_only_what_is_for_the_user_reaches_the_terminal(tmp_path: Path) -> None:
    result = run(tmp_path, "finish")
    assert result.stdout.splitlines() == ["before", "for the user", "after"]
    assert result.stderr.splitlines() == ["after error"]


def test_the_log_has_everything_else_in_order(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier run\n")
    run(tmp_path, "finish")
    assert (tmp_path / "log").read_text().splitlines() == [
        "of an earlier run",
        "early",
        "early from a child",
        "late",
        "late error",
        "a warning",
        "late from a child",
    ]


def test_output_is_back_when_an_exception_leaves_the_block(tmp_path: Path) -> None:
    result = run(tmp_path, "raise")
    assert result.stdout.splitlines() == ["before"]
    assert result.stderr.endswith("ValueError: x\n")


FULL = """
import sys
from pathlib import Path
from controller.commands.output import CapturedOutput
with CapturedOutput() as output:
    output.move_to(Path("/dev/full"))
    try:
        print("lost", end="")  # stays in Python's buffer, unless PYTHONUNBUFFERED is set
        print("lost", file=sys.stderr)
    except OSError as error:
        print(error.strerror, file=output.terminal)
print("after")
print("after error", file=sys.stderr)
"""


def test_a_log_whose_disk_is_full_leaves_the_terminal_alone(tmp_path: Path) -> None:
    result = run(tmp_path, "finish", FULL)
    assert result.stdout.splitlines() == ["No space left on device", "after"]
    assert result.stderr.splitlines() == ["after error"]


def test_a_process_without_standard_streams_gets_empty_ones(tmp_path: Path) -> None:
    """As a daemon starts one. Files that are opened later must not become its output."""
    code = (
        "import sys; from controller.commands.cli import main\n"
        "try: main(['list'])\nexcept SystemExit as end: open('status', 'w').write(str(end.code))\n"
        "open('other', 'w').write('of its own'); print('lost'); print('lost', file=sys.stderr)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(shell, cwd=tmp_path, env=env, timeout=120, check=True)
    assert (tmp_path / "status").read_text() == "0"
    assert (tmp_path / "other").read_text() == "of its own"
