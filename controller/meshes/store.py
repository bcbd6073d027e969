"""TorchStore for one run: the directory of published weights, and their transport where memory is not shared.

Trainer and generator processes look it up through Monarch under TorchStore's default name, so they need no handle.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torchstore
from monarch.actor import endpoint, get_or_spawn_controller
from torchstore.api import DEFAULT_TORCHSTORE_NAME
from torchstore.controller import Controller, StorageInfo
from torchstore.transport.pipe import Request

from controller.meshes.errors import DeadlineError
from controller.meshes.mesh import Mesh
from controller.meshes.place import Place
from controller.meshes.weight_receivers import GeneratorHost, WeightReceivers

_VOLUME = "torchstore.storage_volume:StorageVolume"
_START_S = 60.0
_STOP_S = 5.0


class AsyncController(Controller):
    """TorchStore's directory actor with all of its endpoints asynchronous.

    TorchStore 0.1.2 mixes synchronous and asynchronous endpoints in one actor, which Monarch refuses since 0.2
    ("Controller mixes both async and sync endpoints").

    Remove when TorchStore's own `Controller` can be spawned; `tests/controller/meshes/test_store.py` fails then.
    """

    @endpoint
    async def get_controller_strategy(self) -> torchstore.TorchStoreStrategy:
        """How keys are distributed over volumes."""
        return _method(Controller.get_controller_strategy)(self)

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        """The volumes that hold a key."""
        return _method(Controller.locate_volumes)(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Request, storage_volume_id: str) -> None:
        """Notes that a volume holds a key."""
        _method(Controller.notify_put)(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        """All keys, or only those that begin with `prefix`."""
        return _method(Controller.keys)(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        """Notes that a volume no longer holds a key."""
        _method(Controller.notify_delete)(self, key, storage_volume_id)


def _method(of_endpoint: Any) -> Any:
    """The plain function that an `@endpoint` wraps."""
    return of_endpoint._method


class WeightStore:
    """A running TorchStore with one storage volume in its own process. A controller has at most one at a time."""

    def __init__(self, mesh: Mesh, directory: Any, receivers: WeightReceivers) -> None:
        """Use `launch`."""
        self.mesh = mesh
        self._directory = directory
        self.receivers = receivers

    @classmethod
    async def launch(
        cls,
        log_dir: Path,
        *,
        hosts: Place | None = None,
        generator_hosts: Callable[[], Sequence[GeneratorHost]] = list,
    ) -> "WeightStore":
        """Starts the directory, the volume's process on `hosts` or else on this host, and receiving processes.

        `generator_hosts` returns the hosts that weights have to be sent to now.

        Raises RuntimeError if the controller already has a store.
        """
        env: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
        strategy = torchstore.SingletonStrategy()
        mesh = await Mesh.spawn(
            "store", _VOLUME, strategy.get_volume_id, num_ranks=1, env=env, log_dir=log_dir, hosts=hosts
        )
        try:
            async with asyncio.timeout(_START_S):
                directory = await get_or_spawn_controller(DEFAULT_TORCHSTORE_NAME, AsyncController)
            await mesh.answer(
                directory.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=mesh.actors), "start"
            )
        except TimeoutError:
            await mesh.stop()
            raise DeadlineError("store", f"its directory did not start within {_START_S:g} s", verb="start") from None
        except BaseException:
            await mesh.stop()
            raise
        store = cls(mesh, directory, WeightReceivers(log_dir, generator_hosts))
        try:
            await store.receivers.start()
        except BaseException:
            await store.stop()
            raise
        return store

    async def stop(self) -> None:
        """Forgets every key and ends the processes. May be called again."""
        await self.receivers.stop()
        torchstore.reset_client()
        with contextlib.suppress(Exception):  # its process may have died
            async with asyncio.timeout(_STOP_S):
                await self.mesh.answer(self._directory.teardown.call(), "stop")
        await self.mesh.stop()
