"""`ownloop bisect`: why do two trainings differ?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.command_line import FAILED
from controller.commands.output import CapturedOutput


@dataclass(frozen=True, kw_only=True)
class Bisect(OfRuns):
    """Finds the first step, verb and tensor in which two trainings differ, and the term that explains it.

    A and B are runs, capsules, batches that TRL (.pt), verl (.pkl) or prime-rl (.bin) dumped, or "ours": our loss on
    the other's batch. ",NAME=VALUE" behind one changes a term: "ours,denominator=sequences".
    """

    a: Annotated[str, Positional, arg(metavar="A")]
    """The training whose step is computed again, with one term changed at a time."""
    b: Annotated[str, Positional, arg(metavar="B")]
    """The training whose results are to be explained."""
    step: int | None = None
    """Of a run beside a capsule or a dump: its step."""
    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """The weights of a dump, as a Hugging Face directory; or where those of a capsule are."""

    def run(self) -> int:
        """Prints what differs and why. Returns 1 if anything differs beyond rounding."""
        from controller.runs.folder import CONFIG_FILE
        from ownloop_instruments.terms import Bench
        from ownloop_instruments.trainings import RunSide, compare_runs, explain, recorded

        runs = [
            next((p for p in (Path(n), self.runs / n) if (p / CONFIG_FILE).is_file()), None) for n in (self.a, self.b)
        ]
        with CapturedOutput() as output:
            bench = Bench()
            sides = [RunSide(each) if each else None for each in runs]
            if sides[0] and sides[1]:
                equal, lines = compare_runs(bench, sides[0], sides[1])
            else:
                if any(sides) and self.step is None:
                    raise ValueError("--step is missing: the step of the run that the other side is compared with")
                at = [side.at(self.step or 0) if side else None for side in sides]
                theirs = at[1] or recorded(self.b, self.model, None)
                ours = at[0] or recorded(self.a, self.model, theirs)
                equal, lines = explain(bench, ours, theirs)
            for line in lines:
                print(line, file=output.terminal)
        return 0 if equal else FAILED
