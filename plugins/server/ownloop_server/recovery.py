"""Adapters that outlive the trainer's processes, so that their clients need not hear of a process that dies.

When the trainer dies, another is started in its place, and every adapter makes itself again at its next call: from its
recovery point, a checkpoint in the server's folder, and from the calls since then, which it repeats. A call that was
under way is made once more. Nothing is lost, and no optimizer step is counted twice.
"""

import asyncio
import os
import shutil
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from controller.processes.errors import MeshError, PolicyLostError
from controller.runs.restarts import RestartLimit
from rl.lora import LoRAConfig, Policy
from rl.protocols import Generator, Trainer
from rl.types import Datum, ForwardBackwardOutput, OptimStepOutput

REPEAT_S = 60.0
"""An adapter writes a recovery point when the calls that it would have to repeat have taken so long."""
REPEAT_BYTES = 64 * 2**20
"""As `REPEAT_S`, for the memory that the batches of these calls take."""
REPEAT_CALLS = 500
"""As `REPEAT_S`, for the number of these calls: Python's own objects take more memory than a small batch."""


class AdapterLostError(RuntimeError):
    """An adapter could not be restored after its trainer died."""


class Base(Protocol):
    """The running trainer of a frozen base."""

    async def adapter(self, name: str, config: LoRAConfig) -> Trainer:
        """Makes an adapter."""
        ...


class RestartingTrainer:
    """The trainer of a frozen base. When its processes die, others take their place."""

    def __init__(
        self, running: Base, start: Callable[[], Awaitable[Base]], limit: RestartLimit, say: Callable[[str], None]
    ) -> None:
        """`start` starts another one after the running one has died. `say` prints that."""
        self.running = running
        self._start = start
        self._limit = limit
        self._say = say
        self._starting: asyncio.Task[None] | None = None

    async def replace(self, dead: Base, error: MeshError) -> None:
        """Returns when another trainer runs than the dead one. Raises `error` if it died too often lately."""
        if dead is not self.running:  # another adapter has noticed it first, and a new trainer runs
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_again(error))
        await asyncio.shield(self._starting)

    async def _start_again(self, error: MeshError) -> None:
        try:
            if not self._limit.allows_another():
                raise error
            self._say(f"{error.mesh} failed: {error.reason}; starting it again ({self._limit})")
            self.running = await self._start()
            self._say(f"{error.mesh} runs again; adapters are restored as their clients need them")
        finally:
            self._starting = None


Call = Callable[[Trainer], Awaitable[object]]


class RecoveringAdapter:
    """Implements `rl.protocols.Trainer` for one adapter. At most one call of it may be under way.

    Every call goes through `_run`, and one that changes the adapter into the journal. Verbs that are not written out
    change nothing, and are passed on as they are.
    """

    def __init__(self, base: RestartingTrainer, name: str, config: LoRAConfig, folder: Path) -> None:
        """`folder` is for the recovery point, and no one else's. Use `make`."""
        self._base = base
        self._name = name
        self._config = config
        self._folder = folder
        self._trainer: Trainer | None = None
        self._made_by: Base = base.running
        self._origin: tuple[Path, bool] | None = None  # a checkpoint, and whether only its weights count
        self._calls: list[Call] = []  # since the origin
        self._calls_s = 0.0
        self._calls_bytes = 0
        self._has_gradient = False
        self._num_points = 0
        self._next_try = 0.0  # on the monotonic clock, of a recovery point that could not be written

    @classmethod
    async def make(cls, base: RestartingTrainer, name: str, config: LoRAConfig, folder: Path) -> Trainer:
        """A new adapter. Raises as `Trainer.adapter`."""
        made = cls(base, name, config, folder)
        await made._run(_nothing)
        return cast(Trainer, made)

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[object]]:
        if verb not in vars(Trainer):
            raise AttributeError(f"a trainer has no {verb!r}")
        return lambda *args, **options: self._run(_call(verb, args, options))

    async def forward_backward(self, batch: Sequence[Datum], *args: object, **options: object) -> ForwardBackwardOutput:
        """As `Trainer.forward_backward`."""
        size_bytes = sum(
            datum.tokens.nbytes + sum(array.nbytes for array in datum.loss_inputs.values()) for datum in batch
        )
        output = await self._change(_call("forward_backward", (batch, *args), options), size_bytes)
        self._has_gradient = True
        return output

    async def optim_step(self, *args: object, **options: object) -> OptimStepOutput:
        """As `Trainer.optim_step`."""
        output = await self._change(_call("optim_step", args, options))
        self._has_gradient = False
        too_many = self._calls_s > REPEAT_S or self._calls_bytes > REPEAT_BYTES or len(self._calls) >= REPEAT_CALLS
        # after a step: there is no gradient that a checkpoint would lose
        if too_many and time.monotonic() >= self._next_try:
            await self._begin_at(lambda point: self._run(_call("save_checkpoint", (point,), {})))
        return output

    async def zero_grad(self) -> None:
        """As `Trainer.zero_grad`."""
        await self._change(_call("zero_grad", (), {}))
        self._has_gradient = False

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, **options: object) -> None:
        """As `Trainer.save_checkpoint`. A checkpoint on disk is one, even if it cannot become the recovery point."""
        await self._run(_call("save_checkpoint", (path,), {"asynchronous": asynchronous, **options}))
        if not self._has_gradient and not asynchronous:  # a checkpoint holds no gradient
            await self._begin_at(partial(_copy, path))

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """As `Trainer.load_checkpoint`."""
        version = await self._change(_call("load_checkpoint", (path,), {"weights_only": weights_only}))
        self._has_gradient = False
        await self._begin_at(partial(_copy, path), weights_only=weights_only)
        return version

    async def drop(self) -> None:
        """As `Trainer.drop`. A trainer that died has no adapter that could be dropped."""
        try:
            if self._trainer is not None:
                await self._trainer.drop()
        except MeshError:
            pass
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self, call: Call) -> Any:
        """Makes a call; if the trainer dies, makes it once more on another trainer."""
        died_before = False
        while True:
            base = self._made_by
            try:
                if self._trainer is None:
                    # asked anew: the trainer may have been replaced meanwhile
                    base = self._made_by = self._base.running
                    self._trainer = await self._make_again(base)
                return await call(self._trainer)
            except MeshError as error:
                if error.mesh == "store":  # without it nothing can be published; the server ends
                    raise
                self._trainer = None
                if died_before:
                    raise
                died_before = True
                # returns when a trainer runs, on which the loop makes the call again
                await self._base.replace(base, error)

    async def _change(self, call: Call, size_bytes: int = 0) -> Any:
        """Makes a call that changes the adapter, and writes it into the journal."""
        began = time.monotonic()
        result = await self._run(call)
        self._calls.append(call)
        self._calls_s += time.monotonic() - began
        self._calls_bytes += size_bytes
        return result

    async def _make_again(self, base: Base) -> Trainer:
        """The adapter as it was after its last call, on a trainer that does not have it."""
        trainer = await base.adapter(self._name, self._config)
        try:
            if self._origin is not None:
                path, weights_only = self._origin
                await trainer.load_checkpoint(path, weights_only=weights_only)
            for call in self._calls:
                await call(trainer)
        except ValueError as error:
            await trainer.drop()
            raise AdapterLostError(
                f"the trainer died, and its successor could not restore this adapter ({error}); make a training client "
                "of the newest checkpoint that you saved"
            ) from error
        return trainer

    async def _begin_at(self, write: Callable[[Path], Awaitable[None]], *, weights_only: bool = False) -> None:
        """Writes a recovery point, and forgets the calls before it and the point before.

        If it cannot be written, all calls would be repeated. They have been executed, so this is no error of theirs.
        """
        self._num_points += 1
        point = self._folder / str(self._num_points)
        try:
            await write(point)
        except MeshError:
            raise
        except Exception:
            traceback.print_exc()
            self._next_try = time.monotonic() + REPEAT_S  # not at every step: a full disk stays full for a while
            shutil.rmtree(point, ignore_errors=True)
            return
        before, self._origin = self._origin, (point, weights_only)
        self._calls, self._calls_s, self._calls_bytes = [], 0.0, 0
        if before is not None:
            shutil.rmtree(before[0], ignore_errors=True)


async def _copy(path: Path, point: Path) -> None:
    """Makes a recovery point of a checkpoint, whose owner may delete or replace it."""
    await asyncio.to_thread(shutil.copytree, path, point, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Files of a checkpoint never change, so a second name for one is a copy."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _call(verb: str, args: tuple[Any, ...], options: Mapping[str, object]) -> Call:
    """A call that any trainer can be asked for, now and again on its successor."""
    return lambda trainer: getattr(trainer, verb)(*args, **options)


async def _nothing(trainer: Trainer) -> None:
    del trainer


class Snapshots:
    """The policies that the generator holds besides the base model.

    A sampling client is a frozen snapshot: it always gives the tokens and log-probs of its version. The generator has
    room for a bounded number of versions, and clients do not say when they are done with one. So the version that was
    used least recently makes room for a new one, and a later request of it fails with an error that says so.
    """

    def __init__(self, generator: Generator, max_kept: int) -> None:
        """`max_kept` is the generator's room."""
        self._generator = generator
        self.max_kept = max_kept
        """Most versions at the same time."""
        self._kept: dict[Policy, None] = {}  # the one that was used last comes last
        self._running: Counter[Policy] = Counter()
        self._pulling = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, policy: Policy) -> bool:
        return policy in self._kept

    async def freeze(self, name: str, trainer: Trainer) -> Policy:
        """Keeps the trainer's current version. `name` is the adapter's."""

        async def pull(version: int) -> Policy:
            if (name, version) not in self._kept:  # the same version may be asked for by several sampling clients
                await self._make_room()
                await self._generator.pull_model_state_dict(version, policy=name, frozen=True)
            return name, version

        return await self._publish(trainer, pull)

    async def follow(self, name: str, trainer: Trainer) -> Policy:
        """Replaces the adapter's live version by the trainer's current one, also under requests that are running."""

        async def pull(version: int) -> Policy:
            if name not in self._kept:  # replacing a version in its place takes no room
                await self._make_room()
            await self._generator.pull_model_state_dict(version, policy=name, mode="inflight")
            return name

        return await self._publish(trainer, pull)

    async def _publish(self, trainer: Trainer, pull: Callable[[int], Awaitable[Policy]]) -> Policy:
        """Pushes and pulls; once more if a process died meanwhile, because pushed weights are lost with a trainer."""
        for is_last in (False, True):
            version = await trainer.push_model_state_dict()
            try:
                async with self._pulling:
                    policy = await pull(version)
                    self._note_use(policy)
                    return policy
            except MeshError:
                if is_last:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def use(self, policy: Policy) -> AsyncGenerator[None]:
        """Keeps a policy while a request of it runs. Raises ValueError if it had to make room."""
        if policy is None:
            yield
            return
        if policy not in self._kept:
            raise ValueError(
                f"this sampling client's weights are no longer kept: the server holds {self.max_kept} versions and "
                "gives up the one that was used least recently; make a new sampling client, or sample from a saved path"
            )
        self._note_use(policy)
        self._running[policy] += 1
        try:
            yield
        except PolicyLostError:
            await self.drop(policy)
            raise ValueError(
                "this sampling client's weights were lost when the generator died; make a new sampling client, or "
                "sample from a saved path"
            ) from None
        finally:
            self._running[policy] -= 1
            self._running += Counter()  # forgets zeros

    async def drop(self, policy: Policy) -> None:
        """Gives a policy up, if it is kept."""
        if policy in self._kept:
            del self._kept[policy]
            await self._generator.drop_policy(policy)

    async def drop_adapter(self, name: str) -> None:
        """Gives up all versions of an adapter."""
        for policy in [p for p in self._kept if p == name or (isinstance(p, tuple) and p[0] == name)]:
            await self.drop(policy)

    def _note_use(self, policy: Policy) -> None:
        self._kept.pop(policy, None)
        self._kept[policy] = None

    async def _make_room(self) -> None:
        if len(self._kept) < self.max_kept:
            return
        idle = next((policy for policy in self._kept if self._running[policy] == 0), None)
        if idle is None:
            raise ValueError(
                f"all {self.max_kept} versions that the server can hold are being sampled from; wait, or start it "
                "with a larger --max-snapshots"
            )
        await self.drop(idle)
