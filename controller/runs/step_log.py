"""The step log of a run: one call per step, one per evaluation, one at the end.

Turns the values of a step into metrics and writes them to the console, `metrics.jsonl`, `rollouts/` and the observers
of plug-ins.
"""

import math
import time
from collections.abc import Mapping, Sequence

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import metric_rows
from controller.runs.observers import Observers
from rl.algorithms.metrics import (
    PhaseClock,
    logprob_mismatch,
    loss_metrics,
    num_completion_tokens,
    num_skipped,
    rollout_metrics,
    update_metrics,
)
from rl.rollouts.evaluation import Evaluation, Interval, Measurement
from rl.system.timeline import collect_gauges, show_progress_with
from rl.types import Datum, ForwardBackwardOutput, Group, OptimStepOutput

_NUM_SAMPLES = 3

EQUAL_REWARDS = "in every group all rewards were equal"
"""The usual reason why a step of rollouts has nothing to learn from."""


class StepLog:
    """One run's step log. Steps count from 1; step 0 is the model before training."""

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        total_steps: int,
        best_reward: float = 1.0,
        *,
        log: Sequence[str] = (),
    ) -> None:
        """`total_steps` is the length of the progress bar; no rollout can have more than `best_reward`.

        `log` names observers that watch this run and not every one. Raises ValueError if one of them cannot begin.
        """
        self.folder = folder
        self.total_steps = total_steps
        self._console = console
        self._observers = Observers(log, folder, console.warn)
        show_progress_with(console.progress)
        self._take_gauges = collect_gauges()
        self._start = time.monotonic()
        self._first_evaluation: Evaluation | None = None
        self._last_evaluation: Evaluation | None = None
        self._first_measurements: Mapping[str, Measurement] = {}
        self._last_measurements: Mapping[str, Measurement] = {}
        self._first_step: int | None = None  # the step after which held-out data were first measured
        self._last_groups: Sequence[Group] = ()
        self._shown_frames = {""}
        self.skipped_in_a_row = 0
        """Number of latest steps, all in a row, with an update that was skipped because of a non-finite gradient."""
        self.without_signal_in_a_row = 0
        """Number of latest steps, all in a row, that had nothing to learn from."""
        self.solved_in_a_row = 0
        """Number of latest steps, all in a row, that had nothing to learn from because every reward was the best."""
        self.solved_at: int | None = None
        """The step that ended the run, because enough such steps were in a row."""
        self.best_reward = best_reward
        self.why_without_signal = EQUAL_REWARDS
        """The reason given for the latest of them."""

    def resume(self) -> None:
        """Restores the counts of a resumed run from the metrics in its folder."""
        self.skipped_in_a_row = self.without_signal_in_a_row = self.solved_in_a_row = 0
        last_step = 0
        for row in metric_rows(self.folder.metrics_file):
            self._count(row)
            last_step = max(last_step, int(row["step"]))
        self._observers.each(lambda observer: observer.resume(last_step))

    def phase(self, text: str) -> None:
        """Shows the user what the run is doing while there is no step to show."""
        self._console.phase(text)

    def note(self, text: str) -> None:
        """Shows the user a line that stays."""
        self._console.note(text)

    def step(
        self,
        step: int,
        clock: PhaseClock,
        groups: Sequence[Group],
        batch: Sequence[Datum],
        output: ForwardBackwardOutput,
        updates: Sequence[OptimStepOutput],
        metrics: Mapping[str, float] | None = None,
        others: Mapping[str, Sequence[OptimStepOutput]] | None = None,
    ) -> None:
        """Records a finished step: the sampled groups, if any, the batch trained on, and what the trainer answered.

        `updates` are the policy's, one or more; `others` those of further models, by name. `metrics` are the
        loop's own. They replace metrics of the same name.
        """
        training_s = clock.seconds("forward_backward") + clock.seconds("optim_step")
        generation_s = clock.seconds("generate")
        norms = dict[str, float]()
        for name, made in {"": updates, **(others or {})}.items():
            norms |= (found := update_metrics(made, name))
            if number := num_skipped(found):
                which = f"{number:.0f} of {len(made)} updates of the {name or 'policy'}"
                norm = next(iter(found.values()))
                self._console.warn(f"step {step}: {which} were skipped: the gradient norm is {norm}")
        sampled_tokens = num_completion_tokens(groups)
        self._write_step(
            step,
            groups,
            {
                **(rollout_metrics(groups) if groups else {}),
                "loss": output.metrics["loss"] / (sampled_tokens or output.metrics["num_loss_tokens"] or 1),
                **loss_metrics(output.metrics),
                **updates[-1].metrics,
                **norms,
                "learning_rate": updates[-1].learning_rate,
                "policy_version": float(updates[-1].policy_version),
                **logprob_mismatch(batch, output),
                **({"generation_tokens_per_s": sampled_tokens / generation_s} if generation_s else {}),
                "training_tokens_per_s": sum(len(datum.tokens) for datum in batch) / training_s,
                **clock.metrics(),
                **(metrics or {}),
            },
        )
        self._observers.each(lambda observer: observer.after_step(step, batch, output))

    def step_without_signal(
        self, step: int, clock: PhaseClock, groups: Sequence[Group] = (), why: str = EQUAL_REWARDS
    ) -> None:
        """Records a step that had nothing to learn from, and why."""
        self.why_without_signal = why
        self._console.warn(f"step {step} made no update: {why}")
        self._write_step(step, groups, {**(rollout_metrics(groups) if groups else {}), **clock.metrics()})
        self._observers.each(lambda observer: observer.after_step(step))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Records what was measured after a number of steps, and the reward on held-out problems, if there are any.

        Raises ValueError if no rollout of a held-out set's first evaluation has a reward: the environment is broken.
        """
        if evaluation.measurements:
            self._record_measurements(step, evaluation.measurements)
        if not evaluation.groups:
            return
        is_first = self._first_evaluation is None
        self._first_evaluation = self._first_evaluation or evaluation
        self._first_step = step if self._first_step is None else self._first_step
        self._last_evaluation = evaluation
        self._console.evaluation(_label(step), evaluation)
        sets = evaluation.sets.items()
        intervals = {f"{set_}{name}": each for set_, part in sets for name, each in part.intervals.items()}
        self._log_intervals(step, intervals, eval_version=evaluation.version)
        for prefix, part in sets:
            self._observers.log_rollouts(step, part.groups, split=f"eval_{prefix}".rstrip("_"))
            self._warn_of_failures(f"evaluation {prefix}{_label(step)}", part.groups)
        if is_first and (failed := [part for _, part in sets if not any(group.rollouts for group in part.groups)]):
            first = next((failure for group in failed[0].groups for failure in group.failures), "none was sampled")
            raise ValueError(f"every rollout of the first evaluation failed, so nothing can be learnt: {first}")
        self._observers.each(lambda observer: observer.after_evaluation({"reward": "reward_mean"}))

    def _record_measurements(self, step: int, measurements: Mapping[str, Measurement]) -> None:
        self._first_measurements = {**measurements, **self._first_measurements}
        self._first_step = step if self._first_step is None else self._first_step
        self._last_measurements = measurements
        self._console.measurements(_label(step), measurements)
        self._log_intervals(step, {name: measurement.interval for name, measurement in measurements.items()})
        self._observers.each(lambda observer: observer.after_evaluation({name: name for name in measurements}))

    def _log_intervals(self, step: int, intervals: Mapping[str, Interval], **more: float) -> None:
        row = {"step": float(step), **more}
        for name, interval in intervals.items():
            row |= {f"eval_{name}": interval.mean, f"eval_{name}_low": interval.low, f"eval_{name}_high": interval.high}
        self._observers.log_metrics(row)

    def finish(self) -> None:
        """Ends the observers, prints three samples and the sentence that says what was achieved.

        Blocks until everything is on disk. Raises `RecordingError` if it cannot be written.
        """
        self._observers.each(lambda observer: observer.finish())
        self.folder.mark_finished()  # before the last flush, which waits for it
        self.folder.flush()
        self._observers.close()
        self._console.samples(self._last_groups[:_NUM_SAMPLES])
        self._console.done(self._summary())

    def _summary(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        took = f"in {minutes} min {seconds} s; everything is in {self.folder.path}"
        changes: list[str] = []
        for name, last in self._last_measurements.items():
            first = self._first_measurements[name]
            change = None if first is last else last.change_since(first)
            changes.append(_change(name, first.interval, last.interval, change, f"{len(last.values)} items"))
        first, last = self._first_evaluation, self._last_evaluation
        if first is not None and last is not None:
            change = None if first is last else last.gain_over(first)
            changes.append(_change("reward", first.reward, last.reward, change, f"{len(last.groups)} problems"))
        solved = "" if self.solved_at is None else f"Solved at step {self.solved_at}. "
        # A resumed run only knows the evaluations since it was resumed.
        one = first is last and all(self._first_measurements[name] is m for name, m in self._last_measurements.items())
        subject = f"Since step {self._first_step}, held-out" if self._first_step and not one else "Held-out"
        return f"{solved}{subject} {'; '.join(changes)} {took}." if changes else f"{solved}Finished {took}."

    def _write_step(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> None:
        row = {"step": float(step), **self._take_gauges(), **metrics}
        self._count(row)
        self._observers.log_metrics(row)
        self._observers.log_rollouts(step, groups)
        self._warn_of_failures(f"step {step}", groups)
        self._console.step(row, self.total_steps)
        self._last_groups = groups

    def _count(self, row: Mapping[str, float]) -> None:
        """Updates the counts with a row of the metrics.

        A row with `skipped` is a step that called the optimizer. Other rows with `seconds_step` are steps without a
        signal, and all others are evaluations.
        """
        if "skipped" in row:
            self.without_signal_in_a_row = self.solved_in_a_row = 0
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if num_skipped(row) else 0
        elif "seconds_step" in row:
            self.without_signal_in_a_row += 1
            # No reward is above the best one, so a mean that equals it says that all rewards do.
            all_best = math.isclose(row.get("reward_mean", math.nan), self.best_reward, rel_tol=1e-9)
            self.solved_in_a_row = self.solved_in_a_row + 1 if all_best else 0

    def _warn_of_failures(self, when: str, groups: Sequence[Group]) -> None:
        """Warns if the environment failed rollouts: how many, how the first one failed, and once where that was."""
        failures = [failure for group in groups for failure in group.failures]
        if failures:
            total = len(failures) + sum(len(group.rollouts) for group in groups)
            sentence, _, frames = failures[0].partition("\n")
            self._console.warn(f"{when}: the environment failed {len(failures)} of {total} rollouts: {sentence}")
            if frames not in self._shown_frames:
                self._shown_frames.add(frames)
                self._console.warn(f"raised in\n{frames}")


def _label(step: int) -> str:
    """When an evaluation was made, in words."""
    return "before training" if step == 0 else f"after {step} step{'s' * (step != 1)}"


def _change(name: str, first: Interval, last: Interval, change: Interval | None, size: str) -> str:
    """How a held-out number changed, in words, or what it is if it was measured once; `size` is that of the data."""
    if change is None:
        return f"{name.replace('_', ' ')} is {last.mean:.3f} (95 % interval [{last.low:.3f}, {last.high:.3f}], {size})"
    return (
        f"{name.replace('_', ' ')} went from {first.mean:.3f} to {last.mean:.3f} "
        f"(change {change.mean:+.3f}, 95 % interval [{change.low:+.3f}, {change.high:+.3f}], {size})"
    )
