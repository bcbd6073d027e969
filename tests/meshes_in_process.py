"""Meshes whose actors live in the test's own process: whole loops run without paying for processes and their imports.

Everything but the process boundary is real: launcher, handles, actors, engines and the bytes of the weights.
"""

import asyncio
import functools
import gc
import inspect
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
import torchstore
from monarch.actor import Actor

from controller.handles.store import WeightStore
from controller.processes.mesh import Mesh
from controller.processes.rank_processes import RankProcesses
from generator.actor import VLLMGenerator
from rl.system.hardware import hand_back_memory
from tests.docs.in_process import draw_no_curves
from tests.stores import FakeStore
from trainer.matrix_rate import matrix_rate

_END_S = 120.0
_matrix_rate = functools.cache(matrix_rate)


@contextmanager
def vllm_in_process() -> Generator[None]:
    """At the end of the block, what vLLM did to this process is undone. Its engines are closed and dropped by then."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine import core

    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    with pytest.MonkeyPatch.context() as patch:
        # vLLM collects garbage and walks through all modules for every engine, a second with its modules loaded.
        patch.setattr(gc, "collect", lambda *_: 0)
        _freeze_once()
        # vLLM keeps engines from being freed, and one that is freed would end what the others share.
        patch.setattr(core, "freeze_gc_heap", lambda: None)
        patch.setattr(core.EngineCore, "shutdown", staticmethod(lambda: None))
        patch.setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(_registers_kernels_once()))
        yield
    cleanup_dist_env_and_memory()
    hand_back_memory()
    torch.set_num_threads = set_num_threads
    os.environ.clear()
    os.environ.update(environment)


@functools.cache
def _freeze_once() -> None:
    gc.freeze()


@functools.cache
def _registers_kernels_once() -> Callable[[], None]:
    from vllm.platforms.cpu import CpuPlatform

    return functools.cache(CpuPlatform.register_triton_kernel_overrides)


@contextmanager
def meshes_in_process() -> Generator[None]:
    """Within the block `Mesh.spawn` starts no process, and every TorchStore is a dictionary.

    Nor are curves drawn, and a trainer does not measure again how fast this machine is. What meshes have in their
    environment is gone at the end.
    """
    stores = defaultdict[str, FakeStore](FakeStore)

    async def client(store_name: str) -> FakeStore:
        return stores[store_name]

    async def launch(log_dir: Path, name: str, **options: Any) -> InProcessStore:
        del options
        assert name not in stores, f"there was a store {name!r} before"
        return InProcessStore(name)

    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "spawn", InProcessMesh.spawn)
        patch.setattr(WeightStore, "launch", launch)
        patch.setattr(torchstore, "client", client)
        patch.setattr("trainer.actor.matrix_rate", _matrix_rate)
        draw_no_curves(patch)
        yield


class InProcessStore:
    """Stands for a running TorchStore."""

    def __init__(self, name: str) -> None:
        """Its mesh has no processes that could die."""
        self.mesh = Mesh("store", None, None, RankProcesses((), ()))
        self.name = name
        self.needed = [self.mesh]
        self.is_free = False

    async def complete(self) -> None:
        """All is on this host."""

    async def stop(self) -> None:
        """Nothing runs."""


class InProcessMesh(Mesh):
    """A mesh of one rank: an actor with a thread of its own."""

    def __init__(self, name: str, actor: Actor, log_file: Path) -> None:
        """Use `spawn`."""
        super().__init__(name, None, InProcessActor(actor), RankProcesses((), (log_file,)))

    @classmethod
    async def spawn(
        cls,
        name: str,
        actor: type[Actor] | str,
        *args: Any,
        num_ranks: int,
        env: Mapping[str, str],
        log_dir: Path,
        **options: Any,
    ) -> "InProcessMesh":
        """Makes the actor; its log file stays empty."""
        del options
        assert num_ranks == 1, "in one process there is one rank"
        os.environ.update(env)
        log_dir.mkdir(parents=True, exist_ok=True)
        log_file = log_dir / f"{name}-0.log"
        log_file.touch()
        made = resolve_name(actor) if isinstance(actor, str) else actor
        return cls(name, made(*args), log_file)

    def rank(self, index: int) -> Any:
        """The only actor."""
        assert index == 0
        return self.actors

    def actor(self, index: int) -> Any:
        """As `rank`."""
        return self.rank(index)

    async def stop(self) -> None:
        """Ends the thread, and vLLM's if there is one."""
        self.actors.stop()

    def kill(self) -> None:
        """As `stop`."""
        self.actors.stop()


class InProcessActor:
    """A rank whose calls run in a thread, in the order in which they were issued."""

    def __init__(self, actor: Actor) -> None:
        """Starts the thread."""
        self._actor = actor
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def packed(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as they are."""
        del verb
        return args

    def send(self, verb: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Begins a call; as with a process, cancelling the future does not reach it."""
        endpoint: Any = getattr(type(self._actor), verb)
        # A concurrent endpoint is wrapped in a function that sends the answer to a port.
        call = inspect.unwrap(endpoint._method)(self._actor, *arguments)

        async def in_turn() -> Any:
            async with self._turn:
                return await call

        running = call if endpoint._explicit_response_port else in_turn()
        return asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop)))

    def stop(self) -> None:
        """Ends the thread. May be called again."""
        if self._loop.is_closed():
            return
        if isinstance(self._actor, VLLMGenerator):
            self._actor._engine.close()  # pyright: ignore[reportPrivateUsage]
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise RuntimeError(f"a call of {type(self._actor).__name__} did not end within {_END_S:g} s")
        self._loop.close()
