"""`ownloop drafts`: what drafts would have brought to a run, from its recorded rollouts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.saved_recipe import find_run

if TYPE_CHECKING:  # the import takes time that `--help` need not wait for
    from ownloop_speculation.replay import Request


@dataclass(frozen=True, kw_only=True)
class Drafts(OfRuns):
    """Says what drafts (`--generator.speculation.source`) would have brought to a run, from its recorded rollouts.

    Runs no model: a draft is accepted exactly where it is what was sampled. Speed is that of a replica's steps, by what
    they cost: what the run measured, if it had drafts itself, or `--step-rows`. The prefix cache is as on this host.
    """

    recorded: Annotated[str, Positional, arg(metavar="RUN")]
    """A run's folder or its name within --runs."""
    source: Literal["history", "ngram"] = "history"
    """Where drafts come from."""
    running: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Requests that run at the same time."""
    max_draft: int = 8
    """Tokens of the longest draft."""
    min_chance: float = 0.2
    """The least estimated chance at which a token is drafted."""
    step_rows: float | None = None
    """What a step costs that samples nothing, as a multiple of what each further token of it costs, in place of what
    the run measured. A run without drafts has measured nothing, and 16 is taken. For SmolLM2-135M on CPUs it was
    between 16 and 46, and it is more for larger models and on GPUs."""

    def run(self) -> int:
        """Prints a line for each number of running requests."""
        from generator.options import cpu_block_size
        from ownloop_speculation.history import History
        from ownloop_speculation.replay import PrefixCache, replay
        from ownloop_speculation.rule import DraftRule

        run = find_run(self.recorded, self.runs)
        requests, costs = list(_requests(run)), self._costs(run)
        print(f"{'running':>7}  {'drafts right':>12}  {'tokens per request and step':>27}  {'speed':>5}")
        for running in self.running:
            found, without = (
                replay(
                    requests,
                    History(max_tokens=1 << 24, own_only=self.source == "ngram"),
                    DraftRule.with_costs(*costs),
                    PrefixCache(cpu_block_size("bfloat16")),
                    running=running,
                    max_draft=most,
                    min_chance=self.min_chance,
                )
                for most in (self.max_draft, 0)
            )
            right, speed = found.accepted / max(1, found.drafted), without.seconds / max(found.seconds, 1e-9)
            print(f"{running:>7}  {right:>12.2f}  {found.tokens_per_step:>27.2f}  {speed:>5.2f}")
        return 0

    def _costs(self, run: Path) -> tuple[list[float], float, float, float]:
        """Those of `DraftRule.with_costs`, and prints where they are from."""
        from controller.runs.folder import METRICS, read_metrics

        if self.step_rows is not None and self.step_rows <= 0:
            raise ValueError(f"--step-rows is {self.step_rows}; it must be above 0")
        rows = read_metrics(run / METRICS) if self.step_rows is None else []
        measured = next((row for row in reversed(rows) if "engine_seconds_rows_1" in row), None)
        if measured is None:
            step = self.step_rows or 16.0
            print(f"A step costs {step:g} rows: {'no drafts ran' if self.step_rows is None else '--step-rows'}")
            return [step + 1, step + 2], 0.0, 0.0, 1.0
        names = (f"engine_seconds_rows_{1 << bend}" for bend in range(32))
        curve = [measured[name] for name in names if name in measured]
        found = ", ".join(f"{1 << bend}: {1e3 * seconds:.1f}" for bend, seconds in enumerate(curve))
        print(f"A step costs, by rows, in milliseconds that the run measured: {found}")
        check, look, prompt = (measured[f"engine_seconds_{name}"] for name in ("check", "look", "prompt"))
        return curve, check, look, prompt


def _requests(run: Path) -> "Iterator[Request]":
    """The run's training rollouts in their order. Raises ValueError without any."""
    from controller.runs.folder import ROLLOUTS, check_run_schema
    from controller.runs.recording import TRAINING, recorded_files
    from ownloop_speculation.replay import requests_of
    from rl.rollouts.columns import read_groups

    check_run_schema(run)
    files = [file for _, _, file in recorded_files(run / ROLLOUTS, TRAINING)]
    if not files:
        raise ValueError(f"{run} has recorded no rollouts")
    for file in files:
        yield from requests_of(read_groups(file))
