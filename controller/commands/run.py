"""`ownloop run RECIPE [--field value ...]`, `--resume RUN` and `--fork RUN`: a run, to the end of its last process.

Does what every loop needs around it: the configuration, the run's folder, a quiet terminal, an orderly end. The loop is
the coroutine function that the configuration's method `loop` returns, called with (config, folder, console). The
configuration has a field `seed`, for the name of the folder.
"""

import argparse
import contextlib
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.commands.command import FAILED, USAGE, Commands, add_runs_option, folder_named
from controller.commands.output import CapturedOutput
from controller.commands.processes import StopSignals, adopt_orphans, end_descendants
from controller.commands.recipes import check_hardware, configuration, find_recipe, has_gpu_elsewhere
from rl.secret_fields import hide_in_text

if TYPE_CHECKING:
    from controller.runs import Loop, RunFolder

_LOG = "controller.log"


def add_parser(commands: Commands, *, resuming: bool) -> None:
    """Adds the command. With `resuming` it takes no recipe: an option's value would be mistaken for one."""
    parser = commands.add_parser(
        "run", help="run a recipe; `run RECIPE --help` lists its fields", allow_abbrev=False, add_help=False
    )
    if not resuming:
        parser.add_argument(
            "recipe", metavar="RECIPE", help="a name that `ownloop list` shows, or a Python file's path"
        )
    parser.add_argument("--name", help="folder of a new run within --runs; by default recipe, seed and time")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run: its folder, or its name within --runs; with --trust even if you did not start it",
    )
    parser.add_argument(
        "--fork", metavar="RUN", help="a new run from a checkpoint of this one; every --field may be changed"
    )
    if resuming:
        parser.add_argument("--at", type=int, metavar="STEP", help="the checkpoint to fork at (default: the newest)")
        parser.add_argument(
            "--trust", action="store_true", help="execute the folder's recipe even if no run of yours wrote it"
        )
    else:
        parser.add_argument(
            "--replay", type=Path, metavar="RUN", help="train on the rollouts of a run, or of a file; sample nothing"
        )
    add_runs_option(parser)
    parser.set_defaults(command=resume_or_fork if resuming else run)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Starts a new run. Returns the exit status."""
    file = find_recipe(options.recipe)
    with CapturedOutput() as output:
        config = configuration(options.recipe, overrides, "run")
        check_hardware(file, has_gpu=has_gpu_elsewhere(config))
        from controller.commands.resume import recording_file, replayed, with_pinned_models
        from controller.commands.saved_recipe import command_of, save_recipe
        from controller.runs.folder import RunFolder

        config = with_pinned_models(config, lambda text: print(text, file=output.errors))
        recording = recording_file(options.replay).absolute() if options.replay else None
        if recording is not None:
            config = replayed(config, recording)
        loop = _loop(config)
        folder = RunFolder(_run_path(options, config), config)
        save_recipe(folder.path, file, overrides, recording)
        folder.command = command_of(folder.path)
        return _until_the_end(loop, config, folder, output)


def resume_or_fork(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Goes on with a run, or with a new one that begins at its checkpoint. Returns the exit status."""
    if options.resume and options.fork:
        raise ValueError("--resume goes on with a run and --fork begins a new one; give one of them")
    if options.fork:
        return fork(options, overrides)
    for name in ("name", "at"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for a new run; --resume goes on in the folder of {options.resume}")
    return resume(options, overrides)


def fork(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Begins a new run at a checkpoint of another. Returns the exit status."""
    from controller.commands.resume import forked_configuration, forked_folder
    from controller.commands.saved_recipe import command_of, find_run, saved_recipe
    from controller.runs.checkpoints import checkpoint_of

    parent = find_run(options.fork, options.runs)
    checkpoint = checkpoint_of(parent, options.at)
    with CapturedOutput() as output:

        def tell(text: str) -> None:
            print(text, file=output.errors)

        config = forked_configuration(parent, overrides, tell, trust=options.trust)
        check_hardware(Path(saved_recipe(parent)["file"]), has_gpu=has_gpu_elsewhere(config))
        loop = _loop(config)
        name = (
            options.name
            if options.name is not None
            else f"{parent.name}-at-{checkpoint.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        folder = forked_folder(folder_named(options.runs, name), config, parent, checkpoint, overrides)
        folder.command = command_of(folder.path)
        return _until_the_end(loop, config, folder, output)


def resume(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Goes on with a run after its last checkpoint. Returns the exit status."""
    from controller.commands.resume import resumed_configuration
    from controller.commands.saved_recipe import (
        RECIPE_FILE,
        add_options,
        check_has_checkpoint,
        command_of,
        find_run,
        saved_recipe,
    )
    from controller.runs.folder import CONFIG_FILE, RunFolder, is_finished, read_json

    path = find_run(options.resume, options.runs)
    check_has_checkpoint(path)
    with CapturedOutput() as output:
        config = resumed_configuration(path, overrides, trust=options.trust)
        if is_finished(path) and getattr(config, "num_steps", None) == read_json(path / CONFIG_FILE).get("num_steps"):
            print(f"{path} is finished; --num-steps N continues it", file=output.terminal)
            return 0
        check_hardware(Path(saved_recipe(path)["file"]), has_gpu=has_gpu_elsewhere(config))
        print(f"resuming with the recipe in {path / RECIPE_FILE}", file=output.errors)
        loop = _loop(config)
        folder = RunFolder(path, config, resume=True)
        add_options(folder.path, overrides, trust=options.trust)
        folder.command = command_of(folder.path)
        return _until_the_end(loop, config, folder, output)


def _loop(config: Any) -> "Loop":
    """The loop of a configuration. Raises ValueError if it names none."""
    if not hasattr(config, "loop"):
        raise ValueError(f"{type(config).__name__} has no method loop(), which returns the function to train with")
    return config.loop()


def _run_path(options: argparse.Namespace, config: Any) -> Path:
    """The folder of a new run: the one that `--name` names, or one that is free."""
    if options.name is not None:
        return folder_named(options.runs, options.name)
    path = options.runs / f"{Path(options.recipe).stem}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def _until_the_end(loop: "Loop", config: Any, folder: "RunFolder", output: CapturedOutput) -> int:
    """Runs the loop and ends all of its processes. Returns the exit status."""
    from controller.commands.export_run import add_model_card, name_of_data
    from controller.runs.console import Console
    from controller.runs.restarts import run_with_restarts

    output.move_to(folder.logs / _LOG)
    console = Console(output.terminal)

    def say_saved() -> None:
        console.close()
        with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
            print(f"interrupted; saved: {_saved(folder)}", file=output.errors, flush=True)

    adopt_orphans()
    code = 0
    with StopSignals(say_saved, lambda: folder.saving) as stop:
        try:
            stop.run(run_with_restarts(loop, config, folder, console))
        except BaseException as error:  # whatever it is, the processes must end and the user must be told
            traceback.print_exc()  # to the log
            console.close()
            if stop.received is None:
                code = _explain(error, folder, output)
        finally:
            console.close()
            end_descendants(grace_s=0.5)
        if code == 0 and (error := _unwritten(folder, finished=stop.received is None)) is not None:
            code = _explain(error, folder, output)
        if code == 0 and stop.received is None:
            add_model_card(folder.path, name_of_data(config))
        if stop.received is not None:
            say_saved()
            code = 128 + stop.received
    return code


def _unwritten(folder: "RunFolder", *, finished: bool) -> Exception | None:
    """Waits until everything that the run recorded is on disk. Returns why it is not, if it is not.

    `finished` says whether to record that the run came to its end.

    A process that a signal ends does not come to the end of its other threads.
    """
    try:
        if finished:
            folder.mark_finished()
        folder.flush()
    except Exception as error:
        return error
    return None


def _explain(error: BaseException, folder: "RunFolder", output: CapturedOutput) -> int:
    """Says in short what ended the run; the traceback is in the log. Returns the exit status."""
    if isinstance(error, ValueError) and (folder.resumed or not folder.metrics()):
        print(f"error: {hide_in_text(str(error))}", file=output.errors)
        if folder.resumed or any(log.name != _LOG for log in folder.logs.iterdir()):
            print(f"details in {folder.logs}", file=output.errors)  # processes were started, and may say more
        else:
            folder.discard()
        return USAGE
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    print(f"error: {type(error).__name__}: {hide_in_text(str(error))}{where}", file=output.errors)
    print(f"saved: {_saved(folder)}\ndetails in {folder.logs / _LOG}", file=output.errors)
    return FAILED


def _saved(folder: "RunFolder") -> str:
    """What the folder holds, and how to go on."""
    from controller.commands.saved_recipe import how_to_go_on

    return f"{folder.saved()}\n{how_to_go_on(folder.path)}"
