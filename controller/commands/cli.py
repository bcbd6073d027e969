"""The command line: `ownloop run RECIPE [--field value ...]`, `run --resume RUN`, and what looks at parts of a run.

Does what every loop needs around it: the configuration, the run's folder, a quiet terminal, an orderly end. The loop is
the coroutine function that the configuration's method `loop` returns, called with (config, folder, console). The
configuration has a field `seed`, for the name of the folder.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from controller.commands.output import CapturedOutput
from controller.commands.processes import StopSignals, adopt_orphans, end_descendants
from controller.commands.recipes import HelpRequestedError, describe, find_recipe, load_recipe, override, recipe_files
from controller.commands.replay import recording_file, replayed
from controller.commands.resume import add_options, find_run, resumed_configuration, save_recipe
from rl.runs.folder import RunFolder, to_json

if TYPE_CHECKING:
    from controller.runs import Loop

T = TypeVar("T")

_STOP_DEADLINE_S = 8.0  # a user is promised that everything is over within 10 s
_FAILED = 1
_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see ownloop --help", file=sys.stderr)
        raise SystemExit(_USAGE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, 1 for a run that failed, 2 for a mistake of the caller, 128 + signal.

    A reader that goes away, as `head` does, counts as the signal SIGPIPE: nobody is told.
    """
    try:
        code = _command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    if code > 128:
        os._exit(code)  # exit handlers would flush to a pipe without reader, or wait for processes that are dead by now
    raise SystemExit(code)


def _command(arguments: Sequence[str]) -> int:
    """Runs one command. The exit status."""
    try:
        options, overrides = _parser(resuming="--resume" in arguments).parse_known_args(arguments)
        return options.command(options, overrides)
    except SystemExit as stop:  # argparse has printed the help or a mistake
        return int(stop.code or 0)
    except HelpRequestedError as help_text:
        print(help_text)
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE


def _parser(*, resuming: bool) -> _Parser:
    """One sub-parser per command. What `run` and `show` do not know goes on to the recipe.

    A resumed run has a recipe already: the value of an option that goes on to it must not be taken for one.
    """
    parser = _Parser(prog="ownloop", description="RL post-training on hardware you own.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run a recipe; `run RECIPE --help` lists its fields", allow_abbrev=False, add_help=False
    )
    if not resuming:
        run.add_argument("recipe", metavar="RECIPE", help="a name that `ownloop list` shows, or a Python file's path")
        run.add_argument("--name", help="folder of the run within --runs; by default recipe, seed and time")
    run.add_argument("--resume", metavar="RUN", help="go on with a run: its folder, or its name within --runs")
    if not resuming:
        run.add_argument(
            "--replay", type=Path, metavar="RUN", help="train on the rollouts of a run, or of a file; sample nothing"
        )
    run.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    run.set_defaults(command=_resume if resuming else _run)
    show = commands.add_parser("show", help="print a recipe's configuration", allow_abbrev=False, add_help=False)
    show.add_argument("recipe", metavar="RECIPE")
    show.set_defaults(command=_show)
    recipes = commands.add_parser("list", help="list the recipes and the hardware that each is for", allow_abbrev=False)
    recipes.set_defaults(command=_list)
    parity = commands.add_parser(
        "parity", help="compare a recipe's trainer and generator on the same tokens", allow_abbrev=False, add_help=False
    )
    parity.add_argument("recipe", metavar="RECIPE")
    parity.add_argument("--limit", type=float, default=0.05, help="largest mean |log-prob mismatch| that passes")
    parity.set_defaults(command=_parity)
    check = commands.add_parser("check-env", help="say what is wrong with an environment", allow_abbrev=False)
    check.add_argument("env", metavar="ENV", help='a recipe, or "module:name" of an environment or what makes one')
    check.set_defaults(command=_check_env)
    compare = commands.add_parser("compare", help="print two runs side by side, step by step", allow_abbrev=False)
    compare.add_argument("run_a", metavar="RUN_A", help="a run's folder, or its name within --runs")
    compare.add_argument("run_b", metavar="RUN_B")
    compare.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")
    compare.set_defaults(command=_compare)
    model = commands.add_parser("model", help="prepare a model and print its directory", allow_abbrev=False)
    model.add_argument("model", metavar="NAME")
    model.set_defaults(command=_model)
    return parser


def _list(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Needs no recipe to be importable."""
    del options
    _refuse(overrides)
    files = recipe_files()
    width = max(map(len, files), default=0)
    for name, file in files.items():
        print(f"{name:<{width}}  {describe(file)}")
    return 0


def _compare(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from controller.commands.compare import comparison

    _refuse(overrides)
    for line in comparison(find_run(options.run_a, options.runs), find_run(options.run_b, options.runs)):
        print(line)
    return 0


def _model(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from controller.runs.models import resolve_model

    _refuse(overrides)
    with CapturedOutput() as output:
        path = resolve_model(options.model, lambda text: print(text, file=output.errors))
        print(path, file=output.terminal)
    return 0


def _check_env(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """One line per finding; 1 if there are any."""
    from controller.commands.check_env import load_env
    from rl.envs.check import check_env

    _refuse(overrides)
    with CapturedOutput() as output:
        findings = check_env(load_env(options.env))
        for finding in findings or ["nothing is wrong with it"]:
            print(finding, file=output.terminal)
    return _FAILED if findings else 0


def _show(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    with CapturedOutput() as output:
        config = _configuration(options.recipe, overrides, "show")
        print(json.dumps(to_json(config), indent=2), file=output.terminal)
    return 0


def _parity(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Saves nothing; what the processes print is kept only until the end."""
    with CapturedOutput() as output:
        config = _configuration(options.recipe, overrides, "parity")
        from controller.commands.parity import recipe_parity

        adopt_orphans()
        with StopSignals(_STOP_DEADLINE_S, lambda: None) as stop:
            try:
                report = asyncio.run(_cancellable(recipe_parity(config), stop))
            except Exception as error:
                if isinstance(error, ValueError):
                    raise
                print(f"error: {type(error).__name__}: {error}", file=output.errors)
                return _FAILED
            except asyncio.CancelledError:
                assert stop.received is not None
                return 128 + stop.received
            finally:
                end_descendants(grace_s=0.5)
        print(report.table(), file=output.terminal)
        if report.worst > options.limit:
            print(f"error: the mismatch is {report.worst:.2e}, above --limit {options.limit:g}", file=output.errors)
            return _FAILED
    return 0


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """A new run, from the command line to the end of the last process."""
    file = find_recipe(options.recipe)
    with CapturedOutput() as output:
        config = _configuration(options.recipe, overrides, "run")
        recording = recording_file(options.replay).absolute() if options.replay else None
        if recording is not None:
            config = replayed(config, recording)
        loop = _loop(config)
        folder = RunFolder(_run_path(options, config), config)
        save_recipe(folder.path, file, overrides, recording)
        return _until_the_end(loop, config, folder, output)


def _resume(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """A run goes on where its last checkpoint left off."""
    path = find_run(options.resume, options.runs)
    with CapturedOutput() as output:
        config = resumed_configuration(path, overrides)
        loop = _loop(config)
        folder = RunFolder(path, config, resume=True)
        add_options(folder.path, overrides)
        return _until_the_end(loop, config, folder, output)


def _loop(config: Any) -> "Loop":
    """The loop of a configuration. Raises ValueError if it names none."""
    if not hasattr(config, "loop"):
        raise ValueError(f"{type(config).__name__} has no method loop(), which returns the function to train with")
    return config.loop()


def _until_the_end(loop: "Loop", config: Any, folder: RunFolder, output: CapturedOutput) -> int:
    """Runs the loop; all of its processes are over when this returns. The exit status."""
    # Later than the configuration, so that a mistake in it is reported at once.
    from controller.runs.console import Console

    output.move_to(folder.logs / "controller.log")
    console = Console(output.terminal)

    def say_saved() -> None:
        console.close()
        print(f"interrupted; saved: {_saved(folder)}", file=output.errors, flush=True)

    adopt_orphans()
    code = 0
    with StopSignals(_STOP_DEADLINE_S, say_saved) as stop:
        try:
            asyncio.run(_cancellable(loop(config, folder, console), stop))
        except BaseException as error:  # whatever it is, the processes must end and the user must be told
            traceback.print_exc()  # to the log
            console.close()
            if stop.received is None:
                code = _explain(error, folder, output)
        finally:
            console.close()
            end_descendants(grace_s=0.5)
        if stop.received is not None:
            say_saved()
            code = 128 + stop.received
    return code


async def _cancellable(run: Coroutine[Any, Any, T], stop: StopSignals) -> T:
    """Runs it in the task that a signal cancels."""
    stop.cancel_current_task()
    return await run


def _configuration(recipe: str, overrides: Sequence[str], command: str) -> Any:
    """The recipe's configuration with the command line's overrides."""
    file = find_recipe(recipe)
    return override(load_recipe(file), overrides, f"ownloop {command} {recipe}", describe(file))


def _run_path(options: argparse.Namespace, config: Any) -> Path:
    """Folder of a new run; one that nobody named is given a name that is free."""
    if options.name:
        return options.runs / options.name
    path = options.runs / f"{Path(options.recipe).stem}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def _explain(error: BaseException, folder: RunFolder, output: CapturedOutput) -> int:
    """Says in short what ended the run; the log holds the traceback."""
    if isinstance(error, ValueError) and (folder.resumed or not folder.metrics()):
        print(f"error: {error}", file=output.errors)
        return _USAGE
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    print(f"error: {type(error).__name__}: {error}{where}", file=output.errors)
    print(f"saved: {_saved(folder)}\ndetails in {folder.logs / 'controller.log'}", file=output.errors)
    return _FAILED


def _saved(folder: RunFolder) -> str:
    """What the folder holds, and how to go on."""
    return f"{folder.saved()}\nto go on: ownloop run --resume {folder.path}"


def _refuse(arguments: Sequence[str]) -> None:
    """For commands that take no overrides."""
    if arguments:
        raise ValueError(f"unexpected argument {arguments[0]}")


if __name__ == "__main__":
    main()
