"""What a run starts for its weights: TorchStore, and on other hosts with generators what receives weights there.

TorchStore is the directory of published weights, and their transport where memory is not shared. Every store has a name
of its own, under which trainer and generator processes look it up through Monarch. So a process may have several stores
at a time, and one that could not be ended leaves the next ones alone. Monarch cannot end a directory, which has a
thread and ten descriptors; so a launcher takes the name of an ended store, whose directory serves again.
"""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torchstore
from monarch.actor import endpoint, get_or_spawn_controller
from torchstore.controller import Controller

from controller.processes.errors import DeadlineError
from controller.processes.mesh import Mesh
from controller.processes.place import Place

_VOLUME = "torchstore.storage_volume:StorageVolume"
_ENV = {"OMP_NUM_THREADS": "1"}
_START_S = 60.0


class Receivers(Protocol):
    """Processes that receive weights on the hosts of generators, where these are not the trainer's."""

    @property
    def lost(self) -> Sequence[Mesh]:
        """The processes on lost hosts if no host is left, so that a push would reach no generator."""
        ...

    async def start(self) -> None:
        """Starts a process on every host, and replaces each one that dies. Raises `MeshError`."""
        ...

    async def complete(self) -> None:
        """Starts the processes that are missing, as on the hosts of a further generator. Raises `MeshError`."""
        ...

    async def stop(self) -> None:
        """Ends the processes. May be called again."""
        ...


class AsyncController(Controller):
    """TorchStore's directory actor with all of its endpoints asynchronous.

    TorchStore 0.1.2 mixes synchronous and asynchronous endpoints in one actor, which Monarch refuses since 0.2
    ("Controller mixes both async and sync endpoints").

    Remove when TorchStore's own `Controller` can be spawned; `tests/controller/handles/test_store.py` fails then.
    """


def _asynchronous(method: Any) -> Any:
    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return endpoint(call)


for _name in ("get_controller_strategy", "locate_volumes", "notify_put", "keys", "notify_delete"):
    setattr(AsyncController, _name, _asynchronous(getattr(Controller, _name)._method))


class WeightStore:
    """A running TorchStore with one storage volume in its own process."""

    def __init__(self, name: str, mesh: Mesh, directory: Any, receivers: Receivers | None, teardown_s: float) -> None:
        """Use `launch`."""
        self.name = name
        self.mesh = mesh
        self._directory = directory
        self._receivers = receivers
        self._teardown_s = teardown_s
        self._is_down = False
        self.is_free = False
        """Whether it has ended, and its directory, which forgot every key, can serve another store of this name."""

    @classmethod
    async def launch(
        cls,
        log_dir: Path,
        name: str | None = None,
        *,
        hosts: Place | None = None,
        receivers: Receivers | None = None,
        teardown_s: float = 5.0,
    ) -> "WeightStore":
        """Starts the directory, the volume's process on `hosts` or else on this host, and the receivers.

        `name` must be new to this process, or of a store that `is_free`; by default it is made up. `stop` waits
        `teardown_s` for the directory.
        """
        name = name or f"weights-{uuid.uuid4().hex}"
        strategy = torchstore.SingletonStrategy()
        mesh = await Mesh.spawn(
            "store", _VOLUME, strategy.get_volume_id, num_ranks=1, env=_ENV, log_dir=log_dir, hosts=hosts
        )
        async with contextlib.AsyncExitStack() as after_failure:
            after_failure.push_async_callback(mesh.stop)
            try:
                async with asyncio.timeout(_START_S):
                    directory = await get_or_spawn_controller(name, AsyncController)
            except TimeoutError:
                why = f"its directory did not start within {_START_S:g} s"
                raise DeadlineError("store", why, verb="start") from None
            await mesh.answer(
                "start", directory.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=mesh.actors)
            )
            store = cls(name, mesh, directory, receivers, teardown_s)
            after_failure.push_async_callback(store.stop)
            if receivers is not None:
                await receivers.start()
            after_failure.pop_all()
        return store

    @property
    def needed(self) -> Sequence[Mesh]:
        """The meshes without which no version can be pushed."""
        return [self.mesh, *(() if self._receivers is None else self._receivers.lost)]

    async def complete(self) -> None:
        """Has weights reach the hosts of every generator that was started by now. Raises `MeshError`."""
        if self._receivers is not None:
            await self._receivers.complete()

    async def stop(self) -> None:
        """Forgets every key and ends the processes. May be called again."""
        if self._receivers is not None:
            await self._receivers.stop()
        torchstore.reset_client(self.name)
        if not self._is_down:
            self._is_down = True
            await self._tear_down()
        await self.mesh.stop()

    async def _tear_down(self) -> None:
        """Has the directory forget every key. A failure is only printed: no other store has this one's name."""
        try:
            async with asyncio.timeout(self._teardown_s):
                await self.mesh.answer("stop", self._directory.teardown.call())
            self.is_free = True
        except TimeoutError:
            print(f"store: its directory did not forget its keys within {self._teardown_s:g} s", flush=True)
        except Exception as error:  # its process may have died
            print(f"store: its directory could not forget its keys: {type(error).__name__}: {error}", flush=True)
