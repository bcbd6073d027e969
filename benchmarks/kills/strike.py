"""Strikes a fault from inside a run: in its controller, and in the actors of its processes.

The controller notices that the phase is reached. If the victim is about to carry out that very call, it gets an order,
a file that it finds when the call arrives; so the fault strikes in the middle of the call. Otherwise the controller
sends the signal itself, before the call. An exception always needs an order, which the victim follows in its next call.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.kills.cell import process_of, wait_until
from benchmarks.kills.fault import LOG_NAMES, STRIKE_STEP, Fault, Phase, fault_from_environment
from controller.handles import generator_handle, trainer_handle
from controller.runs import Loop, RolloutSource, Run
from controller.runs.folder import complete_checkpoints
from generator.actor import VLLMGenerator
from rl.lora import LoRAConfig
from rl.system.disk import write_whole
from trainer.actor import PolicyTrainer, PublishedEngine

_CALLS: dict[tuple[type[Any], str], Phase] = {
    (trainer_handle.TrainerHandle, "forward_backward"): "forward_backward",
    (trainer_handle.TrainerHandle, "optim_step"): "optim_step",
    (trainer_handle.TrainerHandle, "push_model_state_dict"): "push",
    (trainer_handle.TrainerHandle, "save_checkpoint"): "save",
    (generator_handle.GeneratorHandle, "generate"): "generate",
    (generator_handle.GeneratorHandle, "pull_model_state_dict"): "pull",
}
_CHECKPOINT_S = 60.0
HOST_PHASE = "KILLS_HOST_PHASE"
"""Set in a run whose fault is struck from outside: the phase, or "idle"."""
WAIT = "wait"
"""An order to be busy for `IN_FLIGHT_S` seconds."""
IN_FLIGHT_S = 3.0
_TRAINER_PHASES: Collection[Phase] = ("forward_backward", "optim_step", "push", "save")


class InjectedError(RuntimeError):
    """The exception that a fault raises."""


def with_fault(train: Loop) -> Loop:
    """The loop, in which the fault of this run's environment will strike."""

    async def faulty(config: Any, folder: Any, console: Any) -> None:
        found = fault_from_environment()
        if found is not None and not Strike.installed:
            (HostStrike if HOST_PHASE in os.environ else Strike)(*found).install()
        if "KILLS_CLOCK" in os.environ:
            _let_clock_jump()
        await train(config, folder, console)

    return faulty


def _let_clock_jump() -> None:
    """Sets this process's wall clock an hour forward, then back to before the run, at every other reading."""
    real, jumps = time.time, itertools.cycle((3600.0, -7200.0))
    time.time = lambda: real() + next(jumps)


class Strike:
    """The fault of a run, in its controller. A restarted loop finds it there already."""

    installed = False

    def __init__(self, fault: Fault, folder: Path) -> None:
        """The files of the strike are in `folder`."""
        self._fault = fault
        self._folder = folder
        self._step = 0
        self._evaluating = False
        self._struck = False
        self._log_dir = Path()

    def install(self) -> None:
        """Looks into the calls of this process, and has its meshes run actors that follow orders."""
        Strike.installed = True
        for (owner, name), phase in _CALLS.items():
            setattr(owner, name, self._watched(getattr(owner, name), phase))
        trainer_handle.ACTOR = f"{__name__}:ObedientTrainer"
        generator_handle.ACTOR = f"{__name__}:ObedientGenerator"
        before_step, evaluate, strike = Run.before_step, RolloutSource.evaluate, self

        async def noting_step(run: Run, step: int) -> None:
            strike._step, strike._log_dir = step, run.log_dir
            if step == STRIKE_STEP:  # a run without a checkpoint would begin anew, or could not be resumed
                wait_until(lambda: bool(complete_checkpoints(run.log_dir.parent / "checkpoints")), _CHECKPOINT_S)
            await before_step(run, step)

        async def noting_evaluation(source: RolloutSource, generator: Any) -> Any:
            strike._evaluating = True
            try:
                return await evaluate(source, generator)
            finally:
                strike._evaluating = False

        setattr(Run, "before_step", noting_step)  # noqa: B010
        setattr(RolloutSource, "evaluate", noting_evaluation)  # noqa: B010

    def _watched(self, call: Any, phase: Phase) -> Any:
        async def watched(handle: Any, *arguments: Any, **options: Any) -> Any:
            await self._reach("evaluate" if phase == "generate" and self._evaluating else phase)
            return await call(handle, *arguments, **options)

        return watched

    async def _reach(self, phase: Phase) -> None:
        """Strikes if this is the call to strike in."""
        if self._struck or phase != self._fault.phase or self._step < STRIKE_STEP:
            return
        self._struck = True
        (self._folder / "struck").write_text(str(time.time()))
        await self._strike(phase)

    async def _strike(self, phase: Phase) -> None:
        victim, kind = self._fault.victim, self._fault.kind
        if victim == "controller":
            follow(kind)
            return
        name = LOG_NAMES[victim]
        computes = victim.startswith("trainer") if phase in _TRAINER_PHASES else name.startswith("generator")
        if kind == "exception" or computes or victim == "engine thread":
            write_whole(self._folder / f"{name}.order", kind.encode())
        else:
            process = process_of(self._log_dir / f"{name}.log")
            if process is None:
                raise LookupError(f"no process writes to {name}.log")
            os.kill(process, signal.Signals[kind])


class HostStrike(Strike):
    """Says when the call to strike in is reached, and makes it last. The host is hurt from outside; see on_hosts.py."""

    async def _strike(self, phase: Phase) -> None:
        if os.environ[HOST_PHASE] == "idle":
            await asyncio.sleep(IN_FLIGHT_S)
        else:
            victim = "trainer-0" if phase in _TRAINER_PHASES else "generator-0"
            write_whole(self._folder / f"{victim}.order", WAIT.encode())


def follow(kind: str) -> None:
    """Does to this process what an order says."""
    if kind == WAIT:
        time.sleep(IN_FLIGHT_S)
        return
    if kind == "exception":
        raise InjectedError("the fault that this run was told to strike")
    os.kill(os.getpid(), signal.Signals[kind])


def take_order() -> str | None:
    """The kind of fault that this process was ordered to strike now, once."""
    found = fault_from_environment()
    if found is None:
        return None
    order = found[1] / f"{Path(os.environ['OWNLOOP_LOG_FILE']).stem}.order"
    with contextlib.suppress(FileNotFoundError):
        kind = order.read_text()
        order.unlink()
        return kind
    return None


class Obedient:
    """An object whose methods of these names follow an order first."""

    def __init__(self, real: Any, names: Collection[str]) -> None:
        """Everything else is the real object's."""
        self._real = real
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name in self._names and (kind := take_order()) is not None:
            follow(kind)
        return getattr(self._real, name)


class ObedientTrainer(PolicyTrainer):
    """A rank that strikes its fault in the middle of a call."""

    def _published(self, engine: Any, policy: str | None = None, lora: LoRAConfig | None = None) -> PublishedEngine:
        engine = Obedient(engine, ("forward_backward", "forward", "optim_step", "save_checkpoint"))
        publisher: Any = Obedient(super()._published(engine, policy, lora).publisher, ("publish",))
        return PublishedEngine(engine, publisher)


class ObedientGenerator(VLLMGenerator):
    """A rank that strikes its fault in a call or, if its engine's thread is the victim, between two steps."""

    def __init__(self, *arguments: Any) -> None:
        found = fault_from_environment()
        if found is not None and found[0].victim == "engine thread":
            _make_thread_obedient()
            super().__init__(*arguments)
        else:
            super().__init__(*arguments)
            self._engine: Any = Obedient(self._engine, ("generate", "update_weights"))


def _make_thread_obedient() -> None:
    """Has the engine's thread follow orders: it ends, sleeps for good, or raises."""
    from generator.engine import GenerationEngine

    serve = GenerationEngine._serve  # pyright: ignore[reportPrivateUsage]

    def obedient(engine: GenerationEngine) -> bool:
        match take_order():
            case None:
                return serve(engine)
            case "SIGKILL":
                raise SystemExit
            case "SIGSTOP":
                time.sleep(1e6)
            case _:
                raise InjectedError("vLLM's engine was told to fail")
        return False

    setattr(GenerationEngine, "_serve", obedient)  # noqa: B010
