"""`ownloop regrade`: what another reward would have paid for recorded rollouts, and a recording to train on with it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import numpy as np
from numpy.typing import NDArray
from tyro.conf import Positional, UseAppendAction, arg

from controller.commands.command import OfRuns, TakesFields
from controller.commands.output import CapturedOutput

if TYPE_CHECKING:
    from ownloop_instruments.regrade import Graded
    from rl.protocols import Env
    from rl.types import Rollout

Advantage = Callable[..., NDArray[np.float64]]
_HEAD = ("task", "rollouts", "reward", "now", "changed", "groups", "signal", "now", "gain", "lose", "sign", "size")
_TIME_LIMIT_S = 60.0
_MOST_REASONS = 3
_SHOWN = 60  # characters of an answer
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Regrade(OfRuns, TakesFields):
    """Grades recorded rollouts again, under another reward.

    --env.FIELD value changes a field of the run's own recipe.
    """

    recorded: Annotated[str, Positional, arg(metavar="RUN|FILE.jsonl")]
    """A run's folder, or its name within --runs; or rows with prompt and completion, of any framework."""
    env: Annotated[str | None, arg(metavar="NEW")] = None
    """A recipe, "module:name" of an environment, or of a function of a row's columns for a file. The default is the
    run's own recipe, with its code as it is now."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Write the recording with the new rewards, for `ownloop run RECIPE --replay FOLDER`."""
    gradient: Annotated[int | None, arg(metavar="STEP")] = None
    """Also compare the gradients of this step's rollouts under both rewards, at the run's newest weights before it."""
    columns: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=COLUMN")] = ()
    """Of a file: the column that has what is needed, such as completion=output; may be given several times."""
    advantage: str = ""
    """A name of `ownloop list --advantages`. The default is the run's, or group_mean_std."""
    show: int = 3
    """Rollouts to print whose reward changed most."""

    def run(self) -> int:
        """Prints the table."""
        with CapturedOutput() as output:
            work = self._of_file if self.recorded.endswith(".jsonl") else self._of_run
            for line in work(output.terminal):
                print(line, file=output.terminal)
        return 0

    def _of_file(self, _terminal: TextIO) -> Iterator[str]:
        from ownloop_doctors.rows import parse_columns, problems_of_rows, read_columns
        from ownloop_instruments.regrade import graded_now, regrade_rows
        from rl.advantages import get_advantage
        from rl.checks import named_function

        if self.out is not None or self.gradient is not None or self.fields:
            option = "--out" if self.out is not None else "--gradient" if self.gradient is not None else self.fields[0]
            raise ValueError(f"{option} is for runs: {self.recorded} holds no tokens to train on")
        if self.env is None:
            raise ValueError('--env is missing; for a file it is a function, as "module:function"')
        columns, said = parse_columns(self.columns)
        rows = read_columns(Path(self.recorded), columns, ("prompt", "completion"))
        problems = problems_of_rows(rows, named_function("--env", self.env), said)
        start = time.perf_counter()
        graded = graded_now(regrade_rows(rows, problems, _TIME_LIMIT_S))
        yield self._heading(graded, self.env, time.perf_counter() - start)
        yield from self._lines(graded, get_advantage(self.advantage or "group_mean_std"))

    def _of_run(self, terminal: TextIO) -> Iterator[str]:
        from controller.commands.resume import forked_configuration, recording_file
        from controller.commands.saved_recipe import find_run
        from controller.runs.folder import began_at
        from controller.runs.models import resolve_model
        from controller.runs.recording import read_recording
        from ownloop_instruments.regrade import graded_now, regrade, write_regraded
        from rl.advantages import get_advantage
        from rl.rollouts.guard import time_limit_of
        from rl.rollouts.rendering import Renderer

        def tell(text: str) -> None:
            print(text, file=terminal)

        if self.columns:
            raise ValueError(f"--columns is {self.columns[0]}; it is for files, and {self.recorded} is a run")
        path = find_run(self.recorded, self.runs)
        config, steps = forked_configuration(path, self.fields, tell), read_recording(recording_file(path))
        env = self._environment(config)
        renderer = Renderer(resolve_model(config.model, tell), config.generator.max_model_len, date=began_at(path))
        limit, start = config.env_time_limit_s or time_limit_of(env), time.perf_counter()
        graded = graded_now(regrade(steps, env, config.seed, renderer, limit))
        yield self._heading(graded, env.name, time.perf_counter() - start)
        default = getattr(config, "advantage", "group_mean_std")
        yield from self._lines(graded, get_advantage(self.advantage or default))
        if self.gradient is not None:
            from ownloop_instruments.one_process import gradient_cosines

            yield from gradient_cosines(path, config, [each for each in graded if each.step == self.gradient])
        if self.out is not None:
            write_regraded(graded, self.out)
            yield f"written to {self.out}; to train on it: ownloop run RECIPE --replay {self.out}"

    def _environment(self, config: Any) -> "Env":
        """The environment with the new rewards."""
        from controller.runs.recording import RecordedEnv
        from ownloop_doctors.check_parts import load_env

        if self.env is not None:
            if self.fields:
                raise ValueError(f"{self.fields[0]} changes the run's own recipe, and --env is {self.env}; give one")
            return load_env(self.env)
        if isinstance(config.env, RecordedEnv):
            raise ValueError("--env is missing; the run is itself a replay, which has no environment")
        return config.env

    def _heading(self, graded: Sequence["Graded"], name: str, seconds: float) -> str:
        number, steps = sum(len(each.after) for each in graded), len({each.step for each in graded})
        return f"{number:,} rollouts of {steps} step{'s' * (steps > 1)}, graded in {seconds:.1f} s by {name}"

    def _lines(self, graded: Sequence["Graded"], advantage: Advantage) -> Iterator[str]:
        """The table, a row for each task if there are several, then rollouts that changed and reasons of failures."""
        tasks = sorted({each.task for each in graded})
        parts = {"all": graded}
        if len(tasks) > 1:
            parts |= {name or "-": [each for each in graded if each.task == name] for name in tasks}
        table = [_HEAD, *((name, *_cells(changes(part, advantage))) for name, part in parts.items())]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *cells in table:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            yield "  ".join((name.ljust(widths[0]), *numbers))
        yield from _largest(graded, self.show)
        reasons = [said.partition("\n")[0] for each in graded for said in each.failures]
        if reasons:
            yield f"{len(reasons):,} rollouts have no new reward:"
        yield from [f"  {said}" for said in dict.fromkeys(reasons)][:_MOST_REASONS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What another reward changes in some groups, in those rollouts that have a new reward."""

    num_rollouts: int
    mean_before: float
    """NaN if an old reward is not known; all that compares the two says nothing then."""
    mean_after: float
    num_changed: int
    """Rollouts whose reward changed."""
    num_groups: int
    signal_before: int
    """Groups whose rewards were not all equal."""
    signal_after: int
    gained: int
    """Groups that have a signal now and had none."""
    lost: int
    num_signs: int
    """Rollouts whose advantage has another sign; 0 is one of three."""
    size: float
    """Norm of the change of all advantages, as a part of the norm of the old ones; infinite if those were 0."""


def changes(graded: Sequence["Graded"], advantage: Advantage) -> Changes:
    """Compares rewards, signals and advantages of these groups before and after."""
    from rl.advantages import has_signal

    pairs = [(old.reward, new.reward) for each in graded for old, new in each.pairs]
    old, new = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    known = bool(np.isfinite(old).all()) and len(old) > 0
    before = [known and has_signal(np.array([r.reward for r, _ in each.pairs])) for each in graded]
    after = [has_signal(each.group.rewards) for each in graded]
    both = [_advantages(each, advantage) for each in graded] if known else []
    was, now = np.concatenate([np.zeros((2, 0)), *both], axis=1)
    change, norm = float(np.linalg.norm(now - was)), float(np.linalg.norm(was))
    return Changes(
        num_rollouts=len(pairs),
        mean_before=float(old.mean()) if known else np.nan,
        mean_after=float(new.mean()) if len(new) else np.nan,
        num_changed=int((np.abs(new - old) > _ROUNDING).sum()),
        num_groups=len(graded),
        signal_before=sum(before),
        signal_after=sum(after),
        gained=sum(now_has and not had for had, now_has in zip(before, after, strict=True)),
        lost=sum(had and not now_has for had, now_has in zip(before, after, strict=True)),
        num_signs=int((np.sign(was) != np.sign(now)).sum()),
        size=change / norm if norm else np.inf if change else 0.0,
    )


def _advantages(graded: "Graded", advantage: Advantage) -> NDArray[np.float64]:
    """[2, graded rollouts] advantages before and after."""
    from rl.rollouts.episodes import group_advantages

    if not graded.pairs:
        return np.zeros((2, 0))
    had = [not isinstance(each, str) for each in graded.after]
    return np.stack([group_advantages(graded.before, advantage)[had], group_advantages(graded.group, advantage)])


def _cells(found: Changes) -> Iterator[str]:
    """The columns of `_HEAD` but for the first."""
    before = not np.isnan(found.mean_before)
    rows: list[tuple[str, object, bool]] = [
        (",", found.num_rollouts, True),
        (".3f", found.mean_before, before),
        (".3f", found.mean_after, True),
        (",", found.num_changed, before),
        (",", found.num_groups, True),
        (",", found.signal_before, before),
        (",", found.signal_after, True),
        (",", found.gained, before),
        (",", found.lost, before),
        (",", found.num_signs, before),
        (".2f", found.size, before),
    ]
    return (format(value, form) if known else "-" for form, value, known in rows)


def _largest(graded: Sequence["Graded"], count: int) -> Iterator[str]:
    """The rollouts whose reward changed most, one of a problem in each direction, with the end of their answers."""
    pairs = [(new.reward - old.reward, each, old) for each in graded for old, new in each.pairs]
    chosen: dict[tuple[str, bool], tuple[float, Graded, Rollout]] = {}
    for found in sorted(pairs, key=lambda pair: -abs(pair[0])):
        if abs(found[0]) > _ROUNDING:
            chosen.setdefault((found[1].before.problem_id, found[0] > 0), found)
    for change, each, old in list(chosen.values())[:count]:
        said = " ".join(old.text.split())
        end = said if len(said) <= _SHOWN else f"...{said[-_SHOWN:]}"
        yield f"  step {each.step}, {each.before.problem_id}: {old.reward:g} -> {old.reward + change:g}: {end!r}"
