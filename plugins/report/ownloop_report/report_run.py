"""`ownloop report`: the page of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.output import CapturedOutput
from controller.commands.saved_recipe import RECIPE_FILE, command_of, find_run
from ownloop_report.page import write_report
from ownloop_report.samples import decoder_of
from rl.system.disk import RecordingError


@dataclass(frozen=True, kw_only=True)
class Report(OfRuns):
    """Writes a run's curves, times, samples and warnings as one HTML page."""

    name: Annotated[str, Positional, arg(metavar="RUN")]
    """A run's folder, or its name within --runs. The run need not have ended."""
    to: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the page goes, by default RUN/report.html."""

    def __post_init__(self) -> None:
        """Raises ValueError if the page cannot be written there."""
        if self.to is not None and self.to.is_dir():
            raise ValueError(f"--to is {self.to}, a folder; it must name a file")

    def run(self) -> int:
        """Prints the path of the page."""
        run = find_run(self.name, self.runs)
        with CapturedOutput() as output:
            command = command_of(run) if (run / RECIPE_FILE).is_file() else ""
            decode = decoder_of(run)
            if decode is None:
                output.say("the run's tokenizer is not here: answers are shown without their tokens")
            try:
                print(write_report(run, decode, command, self.to), file=output.terminal)
            except RecordingError as error:
                raise ValueError(str(error)) from error
        return 0
