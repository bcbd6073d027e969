"""Starts the processes that a loop needs and ends them again, whatever happens in between."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from controller.meshes.offline import OfflineGenerator, OfflineGeneratorConfig
from controller.meshes.version_records import VersionRecords
from generator.config import GeneratorConfig
from rl.protocols import Generator, Trainer
from rl.types import WeightTransport
from trainer.config import TrainerConfig

Config = TypeVar("Config", TrainerConfig, GeneratorConfig)
T = TypeVar("T")


@asynccontextmanager
async def launch(
    model: Path, trainer: TrainerConfig, generator: GeneratorConfig, log_dir: Path
) -> AsyncGenerator[tuple[Trainer, Generator]]:
    """A model's trainer and its generator, started side by side; their processes end with the block.

        async with launch(model, config.trainer, config.generator, log_dir) as (trainer, generator):
            ...

    A loop with another cast uses `Launcher`. Raises as that does.
    """
    async with Launcher(log_dir) as launcher:
        yield await asyncio.gather(
            launcher.trainer(model, trainer, generator=generator), launcher.generator(model, generator)
        )


class Launcher:
    """Starts any number of trainers and generators; every process it started has ended when its block is left.

        async with Launcher(log_dir) as launcher:
            trainer, reference, generator = await asyncio.gather(
                launcher.trainer(model, config.trainer, generator=config.generator),
                launcher.trainer(model, config.reference, name="reference"),
                launcher.generator(model, config.generator),
            )

    A call checks what it is given at once, and takes its GPUs, the host's next free ones, in the order of the calls;
    its processes start with the next await. So what is asked for together is checked together, before any process
    starts. A start that fails raises when it is awaited, and leaving the block cancels the others. Names are those of
    the log files and in errors.
    """

    def __init__(self, log_dir: Path) -> None:
        """What the processes print goes to `<log_dir>/<name>-<rank>.log`."""
        self._log_dir = log_dir
        self._names: set[str] = set()
        self._gpus: GPUPool | None = None
        self._starts: list[asyncio.Task[Any]] = []
        self._store: asyncio.Task[None] | None = None
        self._pushing: str | None = None
        self._version_records = VersionRecords()
        self._running: list[_Stoppable] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(running.stop() for running in self._running))

    def trainer(
        self,
        model: Path,
        config: TrainerConfig,
        *,
        name: str = "trainer",
        generator: GeneratorConfig | None = None,
        gpus: Sequence[int] | None = None,
    ) -> "asyncio.Task[Trainer]":
        """Starts a trainer: a policy, and by another `name` its critic, its reference or its teacher.

        Weights are pushed in the dtype of `generator`, which pulls them; without one, `push_model_state_dict` is
        refused. One trainer alone numbers the versions, so only one can push. `gpus`, one per rank, are by default the
        next free ones.

        Raises ValueError for a model that cannot be trained, or not in this layout, for a name that is taken, for a
        second trainer that pushes, and for too few GPUs.
        """
        config = _with_model(config, model)
        if generator is not None:
            if self._pushing is not None:
                raise ValueError(f"generator of {name!r}: {self._pushing!r} pushes already, and only one trainer can")
            _with_model(generator, model).check_model()
        # Here, because it loads torch and Monarch, which a mistake in a recipe should not have to wait for.
        from controller.meshes.trainer_handle import TrainerHandle

        TrainerHandle.check_model(config)
        own_gpus = self._reserve(name, config.num_ranks, gpus)
        store = None if generator is None else self._store_started()
        if generator is not None:
            self._pushing = name

        async def start() -> Trainer:
            dtype = None if generator is None else generator.dtype
            transport: WeightTransport = "auto" if generator is None else generator.weight_transport
            trainer = await TrainerHandle.launch(
                config,
                dtype,
                self._log_dir,
                name=name,
                transport=transport,
                gpus=own_gpus,
                version_records=self._version_records,
            )
            self._running.append(trainer)
            if store is not None:
                await asyncio.shield(store)
            return trainer

        return self._begin(start())

    def generator(
        self, model: Path, config: GeneratorConfig, *, name: str = "generator", gpus: Sequence[int] | None = None
    ) -> "asyncio.Task[Generator]":
        """Starts a generator, or a `GeneratorRouter` over `config.num_replicas` of them.

        `gpus` are one per rank, replica after replica. With several replicas, or if `config.on_failure` is set, a
        replica whose process died is restarted.

        Raises ValueError for a model that cannot be served, or not on so many ranks, for a name that is taken and for
        too few GPUs.
        """
        if isinstance(config, OfflineGeneratorConfig):
            return self._begin(_offline())
        config = _with_model(config, model)
        config.check_model()
        from controller.meshes.generator_handle import GeneratorHandle
        from controller.meshes.generator_router import GeneratorRouter
        from generator.options import check_hardware

        check_hardware(config)
        num_ranks, num_replicas = config.tensor_parallel, config.num_replicas
        own_gpus = self._reserve(name, num_ranks * num_replicas, gpus)
        store = self._store_started()

        async def start_replica(index: int) -> GeneratorHandle:
            return await GeneratorHandle.launch(
                config,
                self._log_dir,
                name=name if num_replicas == 1 else f"{name}-{index}",
                gpus=None if own_gpus is None else own_gpus[index * num_ranks : (index + 1) * num_ranks],
                version_records=self._version_records,
            )

        async def start() -> Generator:
            if num_replicas == 1 and config.on_failure is None:
                generator = await start_replica(0)
            else:
                generator = await GeneratorRouter.launch(
                    start_replica, num_replicas, on_failure=config.on_failure or "retry"
                )
            self._running.append(generator)
            await asyncio.shield(store)
            return generator

        return self._begin(start())

    def _begin(self, start: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(start)
        self._starts.append(task)
        return task

    def _store_started(self) -> asyncio.Task[None]:
        """What all that push or pull wait for; begun when the first of them is asked for."""

        async def start() -> None:
            from controller.meshes.store import WeightStore

            self._running.append(await WeightStore.launch(self._log_dir))

        self._store = self._store or self._begin(start())
        return self._store

    def _reserve(self, name: str, num_ranks: int, gpus: Sequence[int] | None) -> tuple[int, ...] | None:
        if name in self._names:
            raise ValueError(f"name is {name!r}, which is taken; taken are {', '.join(sorted(self._names))}")
        self._gpus = self._gpus or GPUPool(_num_gpus())
        reserved = self._gpus.take(name, num_ranks, gpus)
        self._names.add(name)
        return reserved


class GPUPool:
    """Which of a host's GPUs belong to whom, in the order of asking."""

    def __init__(self, num_gpus: int) -> None:
        """The GPUs are 0 to `num_gpus` - 1."""
        self._num_gpus = num_gpus
        self._next = 0
        self._users: dict[str, int] = {}

    def take(self, name: str, num_ranks: int, gpus: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """The GPUs that `name` may use, one per rank: the next free ones, or those it names, shared or not.

        None on a host without GPUs: it computes on the CPU. A host's only GPU is shared by all that have one rank.
        Raises ValueError when the GPUs do not suffice, and for GPUs that the host does not have.
        """
        if gpus is not None:
            if len(gpus) != num_ranks or not set(gpus) <= set(range(self._num_gpus)) or len(set(gpus)) < num_ranks:
                raise ValueError(
                    f"gpus of {name!r} are {list(gpus)}; it needs {num_ranks} different ones of this host's "
                    f"{self._num_gpus}"
                )
            return tuple(gpus)
        if self._num_gpus == 0:
            return None
        if self._num_gpus == num_ranks == 1:
            return (0,)
        if self._next + num_ranks > self._num_gpus:
            others = "".join(f", after {count} for {user!r}" for user, count in self._users.items())
            raise ValueError(
                f"this host has {self._num_gpus} GPUs; {name!r} needs {num_ranks}, one per rank{others}, which makes "
                f"{self._next + num_ranks}"
            )
        self._users[name] = num_ranks
        self._next += num_ranks
        return tuple(range(self._next - num_ranks, self._next))


async def _offline() -> Generator:
    return OfflineGenerator()


class _Stoppable(Protocol):
    """What a launcher ends."""

    async def stop(self) -> None: ...


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _with_model(config: Config, model: Path) -> Config:
    """The configuration for this model. Raises ValueError when it names another."""
    if config.model not in (Path(), model):
        raise ValueError(f"{type(config).__name__}.model is {config.model}; leave it out, the loop's model is {model}")
    return replace(config, model=model)
