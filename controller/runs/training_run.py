"""A run as its loop sees it: one object for the clock, the metrics, the console and the checkpoints.

A loop says when a step begins and what came of it. `Run` measures the time, writes the run's folder, shows the
user its state, and saves and restores checkpoints. It knows nothing of the algorithm.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.runs.checkpoints import Checkpoints, restored_position
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig
from controller.runs.step_log import EQUAL_REWARDS, StepLog
from rl.algorithms.metrics import PhaseClock
from rl.protocols import Generator, Trainer, best_reward_of
from rl.rollouts.evaluation import Evaluation, Measurement
from rl.system.hardware import without_walking_what_exists
from rl.system.timeline import report_progress
from rl.types import Datum, ForwardBackwardOutput, Group, OptimStepOutput


class _Evaluation:
    """The next evaluation of a run."""

    due: Callable[[], Awaitable[None]] | None = None
    running: asyncio.Future[None] | None = None

    def begin(self, phase: str) -> None:
        """Begins it, if it is due, with a phase in which the trainer works."""
        if phase in ("forward", "forward_backward") and self.due is not None:
            self.running, self.due = asyncio.ensure_future(self.due()), None
            # If the loop ends by an error, the processes end too, and nothing waits for the evaluation.
            self.running.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def over(self) -> None:
        """Waits for it. Begins it if it is due, as in a step without an update."""
        self.begin("forward")
        if self.running is not None:
            running, self.running = self.running, None
            await running


class Run:
    """One run of a loop. Steps count from 1; step 0 is the model before training.

    run = Run(config, folder, console)
    async with run.steps(policy=trainer) as steps:
        for step in steps:
            clock = run.begin_step(step)
            with clock("generate"):
                groups = ...
            run.end_step(groups, batch, output, update)
            await run.checkpoint_if_due()
    run.finish()
    """

    def __init__(self, config: LoopConfig, folder: RunFolder, console: Console) -> None:
        """`config` says how many steps the run has and when it is saved."""
        best_reward = best_reward_of(getattr(config, "env", None))
        self._log = StepLog(folder, console, config.num_steps, best_reward=best_reward, log=config.log)
        self._config = config
        self._checkpoints: Checkpoints | None = None
        self.data = restored_position(folder, config)
        """The place in the training data, which checkpoints store: `start = run.data.take(count)`."""
        self._clock = PhaseClock()
        self._evaluation = _Evaluation()
        self._where = getattr(config, "evaluation", "between")

    @property
    def log_dir(self) -> Path:
        """Where processes log."""
        return self._log.folder.logs

    @property
    def began(self) -> datetime:
        """When the run began, also of a resumed one: the date that a chat template sees."""
        return self._log.folder.began

    @property
    def model_dir(self) -> Path:
        """Where the trained model goes, in Hugging Face's format."""
        return self._log.folder.path / "model"

    @property
    def restored(self) -> Mapping[str, Any]:
        """The values that the loop gave to `checkpoint_if_due` with the restored checkpoint; empty in a new run."""
        return {} if self._checkpoints is None else self._checkpoints.values

    @property
    def last_step(self) -> int:
        """The last finished step of the run; 0 before the first one."""
        return 0 if self._checkpoints is None else self._checkpoints.last_step

    def phase(self, text: str) -> None:
        """Shows the user what the run is doing while there is no step to show."""
        self._log.phase(text)

    def counted(self, text: str, parts: Sequence[int]) -> Iterator[int]:
        """The parts of some work, one after the other. Shows the user how many are done."""
        self.phase(text)
        for num_done, part in enumerate(parts):
            report_progress(text, num_done, len(parts))
            yield part
        report_progress(text, len(parts), len(parts))

    def steps(self, **trainers: Trainer) -> "Steps":
        """The steps still to do, as a block: `async with run.steps(policy=trainer) as steps: for step in steps: ...`.

        Entering the block restores the newest checkpoint into these trainers; `checkpoint_if_due` saves the same ones,
        under these names. The steps end early, at `last_step`, once ten in a row gave every rollout the best reward. If
        the loop's task is cancelled, leaving the block saves the last finished step: the trainers must live until then.
        Entering raises ValueError for a checkpoint of another model or of other trainers.
        """
        self._checkpoints = Checkpoints(self._log, self._config, self.data, **trainers)
        return Steps(self._checkpoints, self._config.num_steps)

    def begin_step(self, step: int) -> PhaseClock:
        """Starts the clock of a step: `with clock("generate"): ...` adds to the step's `seconds_generate`."""
        self.data.begin(step)
        self._clock = PhaseClock(on_begin=self._evaluation.begin)
        return self._clock

    async def evaluate_if_due(
        self, step: int, evaluate: Callable[[Generator], Awaitable[Evaluation]], generator: Generator
    ) -> None:
        """Evaluates the generator after 0, `evaluate_every`, ... steps, and records the result.

        With `evaluation="beside"` it begins with the first phase of the next step in which the trainer works. With
        "apart" the generator's evaluator pulls its version, and samples while the run continues.
        """

        async def evaluation() -> None:
            self.log_evaluation(step, await evaluate(generator))

        if step % self._config.evaluate_every:
            return
        if self._where == "apart":
            from controller.handles.generator_router import evaluator_of  # loads Monarch

            await self._evaluation.over()  # the one before
            generator = await evaluator_of(generator)
        self._evaluation.due = evaluation
        if self._where == "apart":
            self._evaluation.begin("forward")
        if self._where == "between":
            await self._evaluation.over()

    async def evaluate_last(self, evaluate: Callable[[Generator], Awaitable[Evaluation]], generator: Generator) -> None:
        """Evaluates the generator after the last step, and records the result."""
        await self._evaluation.over()
        self.log_evaluation(self.last_step, await evaluate(generator))

    async def evaluated(self) -> None:
        """Waits until the evaluation that is due is over. A loop awaits it before a pull: it measures one version.

        The generator samples for training at no other time, so that training rollouts share no batch with it.
        """
        if self._where != "apart" and (self._evaluation.due or self._evaluation.running):
            with self._clock("evaluate"):
                await self._evaluation.over()

    def end_step(
        self,
        groups: Sequence[Group],
        batch: Sequence[Datum],
        output: ForwardBackwardOutput,
        update: OptimStepOutput | Sequence[OptimStepOutput],
        metrics: Mapping[str, float] | None = None,
        **others: Sequence[OptimStepOutput],
    ) -> None:
        """Records a finished step: the sampled groups, if any, the batch trained on, and what the trainer answered.

        `update` is the policy's, or one for each minibatch; `others` are those of further models, by name. `metrics`
        are the loop's own. They replace metrics of the same name.
        """
        updates = [update] if isinstance(update, OptimStepOutput) else update
        self._log.step(self.data.step, self._clock, groups, batch, output, updates, metrics, others)

    def end_step_without_update(self, groups: Sequence[Group] = (), why: str = EQUAL_REWARDS) -> None:
        """Records a step that had nothing to learn from, and why."""
        self._log.step_without_signal(self.data.step, self._clock, groups, why)

    async def checkpoint_if_due(self, **values: Any) -> None:
        """Saves a checkpoint if the configuration asks for one after this step.

        `values` (JSON types, and lists of groups) are what else the loop needs to continue; a resumed run finds them in
        `restored`. Waits while the recording of rollouts is behind. Raises `RecordingError` if the disk is full,
        ValueError for a value of another type, and `TrainingStoppedError`, with the run saved, after too many steps in
        a row without an update.
        """
        assert self._checkpoints is not None, "Run.steps names the trainers to save; enter it before the first step"
        await self.evaluated()
        if self._checkpoints.saves_after(self.data.step):
            await self._evaluation.over()  # a run that resumes there has its result
        await self._checkpoints.after_step(self.data.step, **values)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Records the reward on held-out problems after `step` steps. An evaluation without problems is ignored."""
        self._log.evaluation(step, evaluation)

    def log_measurements(self, step: int, **measurements: Measurement) -> None:
        """Records measurements on held-out data after `step` steps, by name, the most telling first."""
        self._log.measurements(step, measurements)

    def finish(self) -> None:
        """Draws the curves and prints samples and the sentence that says what the run achieved."""
        self._log.finish()


class Steps:
    """The steps that a run has still to do, as the block around a loop. Made by `Run.steps`.

    Entering the block restores the newest checkpoint. Leaving it waits until the last checkpoint is on disk. If the run
    was stopped (Ctrl-C, SIGTERM and SIGHUP cancel the loop's task), or ends by an error, leaving the block saves the
    last finished step, provided that the trainers still have its parameters.
    """

    def __init__(self, checkpoints: Checkpoints, num_steps: int) -> None:
        """`num_steps` is the last step of the run."""
        self._checkpoints = checkpoints
        self._num_steps = num_steps
        self._exempted = contextlib.ExitStack()
        self.remaining = range(1, num_steps + 1)
        """The steps to do, if the run does not end early; known once the block is entered."""

    async def __aenter__(self) -> Self:
        first = await self._checkpoints.resume()
        self.remaining = range(first, first if self._checkpoints.solved else self._num_steps + 1)
        self._exempted.enter_context(without_walking_what_exists())  # by now all processes have started
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exempted.close()
        if error is not None:
            self._checkpoints.folder.loop_failed()
        if isinstance(error, asyncio.CancelledError):
            await self._checkpoints.save_last_step()
        elif isinstance(error, Exception | SystemExit):
            await self._checkpoints.save_after_failure()
        elif error is None:
            await self._checkpoints.finish()

    def __iter__(self) -> Iterator[int]:
        """Ends after the last step, and earlier once the run is solved."""
        for step in self.remaining:
            if self._checkpoints.solved:
                return
            yield step
