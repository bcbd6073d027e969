"""A run as its loop sees it: one object for the clock, the metrics, the console and the checkpoints.

A loop says when a step begins and what came of it. `Run` measures the time, writes the run's folder, shows the
user its state, and saves and restores checkpoints. It knows nothing of the algorithm.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.runs.checkpoints import Checkpoints, restored_position
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig, options_of
from controller.runs.step_log import EQUAL_REWARDS, StepLog
from rl.algorithms.metrics import PhaseClock
from rl.protocols import Generator, Trainer, best_reward_of
from rl.rollouts.evaluation import Evaluation
from rl.system.hardware import without_walking_what_exists
from rl.system.timeline import report_progress
from rl.types import Datum, ForwardBackwardOutput, Group, OptimStepOutput


class _Evaluation:
    """How a run is evaluated on held-out problems, and the evaluation that is due or under way."""

    def __init__(self, log: StepLog, config: LoopConfig) -> None:
        """`config` says when the run is evaluated, and whether the trainer works meanwhile."""
        self.evaluate: Callable[..., Awaitable[Evaluation]] | None = None
        self.generator: Generator | None = None
        self._log, self._every = log, config.evaluate_every
        self._where = options_of(config).evaluation
        self._due: Callable[[], Awaitable[None]] | None = None
        self._running: asyncio.Future[None] | None = None

    async def after(self, step: int) -> None:
        """Evaluates after 0, `evaluate_every`, ... steps.

        With `evaluation="beside"` it begins with the first phase of the next step in which the trainer works. With
        "apart" the generator's evaluator pulls its version, and samples while the run continues.
        """
        if self.evaluate is None or step % self._every:
            return
        generator = self.generator
        if self._where == "apart" and generator is not None:
            from controller.handles.generator_router import evaluator_of  # loads Monarch

            await self.over()  # the one before
            generator = await evaluator_of(generator)
        self._due = functools.partial(self._record, step, self.evaluate, generator)
        if self._where == "apart":
            self.begin("forward")
        if self._where == "between":
            await self.over()

    async def after_last(self, step: int) -> None:
        """Evaluates after the last step."""
        await self.over()
        if self.evaluate is not None:
            await self._record(step, self.evaluate, self.generator)

    def begin(self, phase: str) -> None:
        """Begins the evaluation, if it is due, with a phase in which the trainer works."""
        if phase in ("forward", "forward_backward") and self._due is not None:
            self._running, self._due = asyncio.ensure_future(self._due()), None
            # If the loop ends by an error, the processes end too, and nothing waits for the evaluation.
            self._running.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def over(self) -> None:
        """Waits for the evaluation. Begins it if it is due, as in a step without an update."""
        self.begin("forward")
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def over_before_pull(self, clock: PhaseClock) -> None:
        """Waits for an evaluation that samples with the weights which a pull replaces: it measures one version.

        The generator samples for training at no other time, so that training rollouts share no batch with it.
        """
        if self._where != "apart" and (self._due or self._running):
            with clock("evaluate"):
                await self.over()

    async def _record(
        self, step: int, evaluate: Callable[..., Awaitable[Evaluation]], generator: Generator | None
    ) -> None:
        self._log.evaluation(step, await (evaluate() if generator is None else evaluate(generator)))


class Run:
    """One run of a loop. Steps count from 1; step 0 is the model before training.

    run = Run(config, folder, console)
    async with run.steps(source.evaluate, generator, policy=trainer) as steps:
        async for step in steps:  # evaluates the model before a step, and saves it after one, when that is due
            async with run.clock("generate"):
                groups = ...
            run.end_step(groups, batch, output, update)
    run.finish()
    """

    def __init__(self, config: LoopConfig, folder: RunFolder, console: Console) -> None:
        """`config` says how many steps the run has and when it is saved."""
        best_reward = best_reward_of(options_of(config).env)
        self._log = StepLog(folder, console, config.num_steps, best_reward=best_reward, log=config.log)
        self._config = config
        self._checkpoints: Checkpoints | None = None
        self.data = restored_position(folder)
        """The place in the training data, which checkpoints store: `start = run.data.take(count)`."""
        self._clock = PhaseClock()
        self._evaluation = _Evaluation(self._log, config)
        self._values: Mapping[str, object] = {}

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
        """The values that the loop gave to `keep` with the restored checkpoint; empty in a new run."""
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

    def steps(
        self,
        evaluate: Callable[..., Awaitable[Evaluation]] | None = None,
        generator: Generator | None = None,
        /,
        **trainers: Trainer,
    ) -> "Steps":
        """The steps still to do, as a block: `async with run.steps(...) as steps: async for step in steps: ...`.

        Entering the block restores the newest checkpoint into these trainers; the same ones are saved, under these
        names, after every `checkpoint_every` steps. The steps end early, at `last_step`, once ten in a row gave every
        rollout the best reward. If the loop's task is cancelled, leaving the block saves the last finished step: the
        trainers must live until then.

        `evaluate` is called with the generator, or without an argument where none is given: before the first step,
        after every `evaluate_every` steps, and after the last one. Its result is recorded.

        Entering raises ValueError for a checkpoint of another model or of other trainers. Going to the next step raises
        what saving and evaluating raise: `RecordingError` if the disk is full, and `TrainingStoppedError`, with the run
        saved, after too many steps in a row without an update.
        """
        self._checkpoints = Checkpoints(self._log, self._config, self.data, **trainers)
        self._evaluation.evaluate, self._evaluation.generator = evaluate, generator
        return Steps(self, self._checkpoints, self._evaluation, self._config.num_steps)

    async def before_step(self, step: int) -> None:
        """What `Steps` does before a step: evaluates, if that is due, and starts the step's clock."""
        await self._evaluation.after(step - 1)
        self.data.begin(step)
        self._clock, self._values = PhaseClock(on_begin=self._evaluation.begin), {}

    @contextlib.asynccontextmanager
    async def clock(self, phase: str) -> AsyncGenerator[None]:
        """Adds the time of its block to the step's `seconds_<phase>`: `async with run.clock("generate"): ...`.

        Evaluations follow these phases: one beside training begins with "forward" or "forward_backward", when the
        generator has nothing else to do, and is over before "pull", since it measures one version of the weights.
        """
        if phase == "pull":
            await self._evaluation.over_before_pull(self._clock)
        with self._clock(phase):
            yield

    def keep(self, **values: object) -> None:
        """What else the loop needs to continue after this step; a resumed run finds it in `restored`.

        JSON types, and lists of groups. The end of the step raises ValueError for a value of another type.
        """
        self._values = values

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

    async def after_step(self) -> None:
        """What `Steps` does after a step: saves a checkpoint, if that is due, once the evaluation is over."""
        assert self._checkpoints is not None
        await self._evaluation.over_before_pull(self._clock)
        if self._checkpoints.saves_after(self.data.step):
            await self._evaluation.over()  # a run that resumes there has its result
        await self._checkpoints.after_step(self.data.step, **self._values)

    def finish(self) -> None:
        """Draws the curves and prints samples and the sentence that says what the run achieved."""
        self._log.finish()


class Steps:
    """The steps that a run has still to do, as the block around a loop. Made by `Run.steps`.

    Entering the block restores the newest checkpoint. Leaving it waits until the last checkpoint is on disk. If the run
    was stopped (Ctrl-C, SIGTERM and SIGHUP cancel the loop's task), or ends by an error, leaving the block saves the
    last finished step, provided that the trainers still have its parameters.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints, evaluation: _Evaluation, num_steps: int) -> None:
        """`num_steps` is the last step of the run."""
        self._run = run
        self._checkpoints = checkpoints
        self._evaluation = evaluation
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
        self._evaluation.evaluate = self._evaluation.generator = None  # they refer to the run, which is free then
        if error is not None:
            self._checkpoints.folder.loop_failed()
        if isinstance(error, asyncio.CancelledError):
            await self._checkpoints.save_last_step()
        elif isinstance(error, Exception | SystemExit):
            await self._checkpoints.save_after_failure()
        elif error is None:
            await self._checkpoints.finish()

    async def __aiter__(self) -> AsyncGenerator[int]:
        """Ends after the last step, and earlier once the run is solved."""
        for step in self.remaining:
            if self._checkpoints.solved:
                break
            await self._run.before_step(step)
            yield step
            await self._run.after_step()
        await self._evaluation.after_last(self._checkpoints.last_step)
