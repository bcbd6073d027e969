"""`ownloop run RECIPE [--field value ...]`, `--resume RUN` and `--fork RUN`: a run, to the end of its last process.

Does what every loop needs around it: the configuration, the run's folder, a quiet terminal, an orderly end. The loop is
the coroutine function that the configuration's method `loop` returns, called with (config, folder, console). The
configuration has a field `seed`, for the name of the folder.
"""

import contextlib
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns, TakesFields, folder_named
from controller.commands.command_line import FAILED, USAGE
from controller.commands.output import CapturedOutput
from controller.commands.processes import StopSignals, adopt_orphans, end_descendants
from controller.commands.recipes import check_hardware, find_recipe, runnable_configuration
from controller.runs.loop_config import options_of

if TYPE_CHECKING:
    from controller.runs import Loop, RunFolder

_LOG = "controller.log"


@dataclass(frozen=True, kw_only=True)
class Run(OfRuns, TakesFields):
    """Runs a recipe; `run RECIPE --help` lists its fields.

    --field value sets a field of the recipe's configuration.
    """

    recipe: Annotated[str | None, Positional, arg(metavar="[RECIPE]")] = None
    """A name that `ownloop list` shows, or a Python file's path; none with --resume and --fork."""
    name: str | None = None
    """The folder of a new run within --runs, by default the recipe, the seed and the time."""
    replay: Annotated[Path | None, arg(metavar="RUN")] = None
    """Train on the rollouts of a run, or of a file; sample nothing."""
    resume: Annotated[str | None, arg(metavar="RUN")] = None
    """Continue a run: its folder, or its name within --runs."""
    fork: Annotated[str | None, arg(metavar="RUN")] = None
    """Begin a new run at a checkpoint of this one; every --field may be changed."""
    at: Annotated[int | None, arg(metavar="STEP")] = None
    """With --fork: the checkpoint's step. The default is the newest."""
    restore: Literal["all", "weights"] | None = None
    """With --fork: what of the checkpoint. "weights" begins at step 1, with a new optimizer and at the data's
    beginning; the default is "all"."""
    profile_steps: str = ""
    """Short for --trainer.profile-steps: steps that torch's profiler records, such as 3:5."""

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that exclude each other, and if there is nothing to run."""
        if self.resume and self.fork:
            raise ValueError("--resume continues a run and --fork begins a new one; give one of them")
        if not self.resume and not self.fork:
            if self.recipe is None:
                raise ValueError("RECIPE is missing: a name that `ownloop list` shows, or a Python file's path")
            wrong = {"--at": self.at is not None, "--restore": self.restore is not None}
            reason = "is for --fork; a recipe is run from its beginning"
        elif self.recipe is not None:
            option = "--resume" if self.resume else "--fork"
            raise ValueError(f"RECIPE is {self.recipe!r} beside {option}, whose run has its recipe; leave it out")
        else:
            wrong = {"--replay": self.replay is not None}
            reason = "is for a run of a recipe"
            if self.resume:
                wrong |= {"--name": self.name is not None, "--at": self.at is not None}
                wrong |= {"--restore": self.restore is not None}
                reason = f"is for a new run; --resume continues in the folder of {self.resume}"
        for option, given in wrong.items():
            if given:
                raise ValueError(f"{option} {reason}")

    @property
    def options(self) -> tuple[str, ...]:
        """The recipe's fields that are given, in full."""
        return (*self.fields, *(("--trainer.profile-steps", self.profile_steps) if self.profile_steps else ()))

    def run(self) -> int:
        """Starts a run or continues one, to its end."""
        with CapturedOutput() as output:
            if self.resume:
                return self._resume(self.resume, output)
            if self.fork:
                return self._fork(self.fork, output)
            return self._begin(str(self.recipe), output)

    def _begin(self, recipe: str, output: CapturedOutput) -> int:
        """Starts a new run."""
        config = runnable_configuration(recipe, self.options, "run")
        from controller.commands.resume import inputs_of, recording_file, replayed, with_pinned_models
        from controller.commands.saved_recipe import save_recipe
        from controller.runs.folder import RunFolder

        config = with_pinned_models(config, output.say)
        recording = recording_file(self.replay).absolute() if self.replay else None
        if recording is not None:
            config = replayed(config, recording)
        loop = _loop(config)
        if self.name is not None:
            path = folder_named(self.runs, self.name)
        else:
            path = self.runs / f"{Path(recipe).stem}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            path = path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")
        inputs = inputs_of(config)
        folder = RunFolder(path, config)
        with folder.discarded_on_failure():
            save_recipe(folder.path, find_recipe(recipe), self.options, recording, inputs=inputs)
        return _until_the_end(loop, config, folder, output)

    def _fork(self, run: str, output: CapturedOutput) -> int:
        """Begins a new run at a checkpoint of another."""
        from controller.commands.resume import folder_with_weights, forked_configuration, forked_folder
        from controller.commands.saved_recipe import find_run, saved_recipe
        from controller.runs.checkpoints import checkpoint_of

        parent = find_run(run, self.runs)
        checkpoint = checkpoint_of(parent, self.at)
        config = forked_configuration(parent, self.options, output.say)
        check_hardware(Path(saved_recipe(parent)["file"]), config)
        loop = _loop(config)
        now = time.strftime("%Y%m%d-%H%M%S")
        name = f"{parent.name}-at-{checkpoint.name}-{now}" if self.name is None else self.name
        make = folder_with_weights if self.restore == "weights" else forked_folder
        folder = make(folder_named(self.runs, name), config, parent, checkpoint, self.options)
        return _until_the_end(loop, config, folder, output)

    def _resume(self, run: str, output: CapturedOutput) -> int:
        """Continues a run after its last checkpoint."""
        from controller.commands.resume import check_inputs, resumed_configuration
        from controller.commands.saved_recipe import (
            RECIPE_FILE,
            add_options,
            check_has_checkpoint,
            find_run,
            saved_recipe,
        )
        from controller.runs.folder import CONFIG_FILE, RunFolder, is_finished, read_json

        path = find_run(run, self.runs)
        check_has_checkpoint(path)
        config = resumed_configuration(path, self.options)
        before, now = read_json(path / CONFIG_FILE).get("num_steps"), options_of(config).num_steps
        if is_finished(path) and now == before:
            print(f"{path} is finished; --num-steps N continues it", file=output.terminal)
            return 0
        check_inputs(path, config)
        check_hardware(Path(saved_recipe(path)["file"]), config)
        output.say(f"resuming with the recipe in {path / RECIPE_FILE}")
        if now != before:
            output.say(f"num_steps was {before} and is {now}: a rate that falls until the last step falls anew")
        loop = _loop(config)
        folder = RunFolder(path, config, resume=True)
        add_options(folder.path, self.options)
        return _until_the_end(loop, config, folder, output)


def _loop(config: Any) -> "Loop":
    """The loop of a configuration. Raises ValueError if it names none."""
    if not hasattr(config, "loop"):
        raise ValueError(f"{type(config).__name__} has no method loop(), which returns the function to train with")
    return config.loop()


def _until_the_end(loop: "Loop", config: object, folder: "RunFolder", output: CapturedOutput) -> int:
    """Runs the loop and ends all of its processes. Returns the exit status."""
    from controller.commands.export_run import add_model_card, name_of_data
    from controller.commands.saved_recipe import command_of
    from controller.runs.console import Console
    from controller.runs.restarts import run_with_restarts

    folder.command = command_of(folder.path)
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
        except BaseException as error:  # in any case the processes must end, and the user must see why
            with contextlib.suppress(OSError):  # the disk may be full
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
        print(f"error: {error}", file=output.errors)
        if folder.resumed or any(log.name != _LOG for log in folder.logs.iterdir()):
            print(f"details in {folder.logs}", file=output.errors)  # processes were started, and may say more
        else:
            folder.discard()
        return USAGE
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    print(f"error: {type(error).__name__}: {error}{where}", file=output.errors)
    print(f"saved: {_saved(folder)}\ndetails in {folder.logs / _LOG}", file=output.errors)
    return FAILED


def _saved(folder: "RunFolder") -> str:
    """The content of the folder, and how to continue."""
    from controller.commands.saved_recipe import resume_hint

    return f"{folder.saved()}\n{resume_hint(folder.path)}"
