"""What a loop says as it goes: one call per step, one per evaluation, one at the end.

Turns the values of a step into metrics, and writes them where a user looks: the console, `metrics.jsonl`,
`rollouts.jsonl` and `reward.png`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.console import Console
from rl.evaluation import Evaluation
from rl.metrics import PhaseClock, logprob_gap, num_completion_tokens, per_token, rollout_metrics
from rl.recording import RunFolder
from rl.types import Datum, ForwardBackwardOutput, Group, OptimStepOutput

_NUM_SAMPLES = 3
# What the trainer and its loss report: sums over the scored tokens, and what is no sum.
_PER_TOKEN = ("clipped_tokens", "capped_tokens", "kl_sampler", "kl_reference", "entropy")
_AS_THEY_ARE = ("ratio_max",)


class Report:
    """One run's reporting. Steps count from 1; step 0 is the model as it came."""

    def __init__(self, folder: RunFolder, console: Console, total_steps: int) -> None:
        """`total_steps` is the length of the progress bar."""
        self.folder = folder
        self.total_steps = total_steps
        self._console = console
        self._start = time.monotonic()
        self._first_evaluation: Evaluation | None = None
        self._last_evaluation: Evaluation | None = None
        self._last_groups: Sequence[Group] = ()
        self.skipped_in_a_row = 0
        """Optimizer steps in a row, up to the latest, that a non-finite gradient made the trainer skip."""
        self.without_signal_in_a_row = 0
        """Steps in a row, up to the latest, that had nothing to learn from."""

    @property
    def log_dir(self) -> Path:
        """Where processes log."""
        return self.folder.logs

    @property
    def model_dir(self) -> Path:
        """Where the trained model goes, in Hugging Face's format."""
        return self.folder.path / "model"

    def phase(self, text: str) -> None:
        """Says what is going on where there is no step to show."""
        self._console.phase(text)

    def step(
        self,
        step: int,
        clock: PhaseClock,
        groups: Sequence[Group],
        batch: Sequence[Datum],
        output: ForwardBackwardOutput,
        update: OptimStepOutput,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """One finished step: what was sampled, trained on, and what came of it. `metrics` are the loop's own."""
        training_s = clock.seconds("forward_backward") + clock.seconds("optim_step")
        generation_s = clock.seconds("generate")
        self.without_signal_in_a_row = 0
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if update.skipped else 0
        if update.skipped:
            self._console.warn(f"step {step} was skipped: its gradient norm is {update.grad_norm}")
        self._write_step(
            step,
            groups,
            {
                **rollout_metrics(groups),
                "loss": output.metrics["loss"] / num_completion_tokens(groups),
                **per_token(output.metrics, _PER_TOKEN),
                **{name: output.metrics[name] for name in _AS_THEY_ARE if name in output.metrics},
                **update.metrics,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "policy_version": float(update.policy_version),
                "skipped": float(update.skipped),
                **logprob_gap(batch, output),
                **({"generation_tokens_per_s": num_completion_tokens(groups) / generation_s} if generation_s else {}),
                "training_tokens_per_s": sum(len(datum.tokens) for datum in batch) / training_s,
                **(metrics or {}),
                **clock.metrics(),
            },
        )

    def step_without_signal(self, step: int, clock: PhaseClock, groups: Sequence[Group]) -> None:
        """A step in which every group's rewards were all equal, so that there was nothing to learn."""
        self.without_signal_in_a_row += 1
        self._console.warn(f"step {step} made no update: in every group all rewards were equal")
        self._write_step(step, groups, {**rollout_metrics(groups), **clock.metrics()})

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Reward on held-out problems after a number of steps."""
        self._first_evaluation = self._first_evaluation or evaluation
        self._last_evaluation = evaluation
        label = "before training" if step == 0 else f"after {step} step{'s' * (step != 1)}"
        self._console.evaluation(label, evaluation)
        reward = evaluation.reward
        self.folder.log_metrics(
            {
                "step": float(step),
                "heldout_reward": reward.mean,
                "heldout_reward_low": reward.low,
                "heldout_reward_high": reward.high,
            }
        )
        self.folder.log_rollouts(step, evaluation.groups, split="heldout")
        self._warn_of_failures(f"evaluation {label}", evaluation.groups)
        self._plot()

    def finish(self) -> None:
        """The reward curve, three samples, and the sentence that says what the run achieved."""
        self._plot()
        self._console.samples(self._last_groups[:_NUM_SAMPLES])
        self._console.done(self._summary())

    def _summary(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        took = f"in {minutes} min {seconds} s; everything is in {self.folder.path}"
        first, last = self._first_evaluation, self._last_evaluation
        if first is None or last is None:
            return f"Finished {took}."
        gain = last.gain_over(first)
        return (
            f"Held-out reward went from {first.reward.mean:.3f} to {last.reward.mean:.3f} "
            f"(change {gain.mean:+.3f}, 95 % interval [{gain.low:+.3f}, {gain.high:+.3f}], "
            f"{len(last.groups)} problems) {took}."
        )

    def _write_step(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> None:
        row = {"step": float(step), **metrics}
        self.folder.log_metrics(row)
        timings = {name: value for name, value in metrics.items() if name.startswith("seconds_")}
        self.folder.log_rollouts(step, groups, timings=timings)
        self._warn_of_failures(f"step {step}", groups)
        self._console.step(row, self.total_steps)
        self._last_groups = groups

    def _warn_of_failures(self, when: str, groups: Sequence[Group]) -> None:
        """Says how many rollouts the environment cost, and what the first of them died of."""
        failures = [failure for group in groups for failure in group.failures]
        if failures:
            total = len(failures) + sum(len(group.rollouts) for group in groups)
            self._console.warn(f"{when}: the environment failed {len(failures)} of {total} rollouts: {failures[0]}")

    def _plot(self) -> None:
        from rl.plotting import plot_reward  # matplotlib, which a mistake in a recipe should not have to wait for

        plot_reward(self.folder.metrics(), self.folder.path / "reward.png", self.folder.path.name)
