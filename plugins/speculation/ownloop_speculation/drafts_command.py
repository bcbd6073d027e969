"""`ownloop drafts`: what drafts would have brought to a run, from its recorded rollouts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.saved_recipe import find_run

if TYPE_CHECKING:  # the import takes time that `--help` need not wait for
    from ownloop_speculation.replay import Request


@dataclass(frozen=True, kw_only=True)
class Drafts(OfRuns):
    """Says what drafts (`--generator.speculation.source`) would have brought to a run, from its recorded rollouts.

    Runs no model: a draft is accepted exactly where it is what was sampled. Speed is that of decoding alone, without
    prompts, by what a step costs; `--step-rows` is this cost, in rows.
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
    step_rows: float = 16.0
    """What a step costs that samples nothing, as a multiple of what each further token of it costs. On CPUs it was
    between 16 and 46 for SmolLM2-135M, and it is more for larger models and on GPUs."""

    def run(self) -> int:
        """Prints a line for each number of running requests."""
        from ownloop_speculation.history import History
        from ownloop_speculation.replay import replay
        from ownloop_speculation.rule import DraftRule

        requests = list(self._requests())
        print(f"{'running':>7}  {'drafts right':>12}  {'tokens per request and step':>27}  {'speed':>5}")
        for running in self.running:
            rule = DraftRule()
            rule.step, rule.row = self.step_rows, 1.0
            found, without = (
                replay(
                    requests,
                    History(max_tokens=1 << 24, own_only=self.source == "ngram"),
                    rule,
                    running=running,
                    max_draft=most,
                    min_chance=self.min_chance,
                )
                for most in (self.max_draft, 0)
            )
            right, speed = found.accepted / max(1, found.drafted), without.seconds / max(found.seconds, 1e-9)
            print(f"{running:>7}  {right:>12.2f}  {found.tokens_per_step:>27.2f}  {speed:>5.2f}")
        return 0

    def _requests(self) -> "Iterator[Request]":
        """The run's training rollouts in their order. Raises ValueError without any."""
        from controller.runs.folder import ROLLOUTS, check_run_schema
        from controller.runs.recording import TRAINING, recorded_files
        from ownloop_speculation.replay import requests_of
        from rl.rollouts.columns import read_groups

        run = find_run(self.recorded, self.runs)
        check_run_schema(run)
        files = [file for _, _, file in recorded_files(run / ROLLOUTS, TRAINING)]
        if not files:
            raise ValueError(f"{run} has recorded no rollouts")
        for file in files:
            yield from requests_of(read_groups(file))
