"""Starts the processes that a loop needs, and ends them however the loop ends."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from controller.handles.adapters import POLICY, BoundGenerator, check_lora, check_same_base
from controller.handles.colocated import SharedGPUs, Side
from controller.handles.offline import OfflineGeneratorConfig, offline_generator
from controller.handles.replicas import Stoppable
from controller.launching.assignments import Assignment, Assignments
from controller.launching.hosts import Hosts
from generator.config import GeneratorConfig
from rl.lora import LoRAConfig
from rl.protocols import Generator, Trainer
from rl.system.hardware import without_garbage_collection
from rl.system.timeline import report_progress
from rl.weights.version import VersionRecords
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine

if TYPE_CHECKING:  # the imports would load torch and Monarch
    from controller.handles.store import WeightStore
    from controller.handles.trainer_handle import TrainerHandle
    from controller.processes.mesh import Mesh
    from trainer.engines.model_check import ModelLimits

Config = TypeVar("Config", TrainerConfig, GeneratorConfig)
T = TypeVar("T")

_OTHERS_FIRST_S = 0.02  # in which the processes of a trainer and a generator, which take longer, are started


@asynccontextmanager
async def launch(
    model: Path, trainer: TrainerConfig, generator: GeneratorConfig, log_dir: Path, hosts: Hosts | None = None
) -> AsyncGenerator[tuple[Trainer, Generator]]:
    """Starts a model's trainer and generator side by side; their processes end with the block.

        async with launch(model, TrainerConfig(), GeneratorConfig(), log_dir) as (trainer, generator):
            ...

    A loop that needs other or more processes uses `Launcher`, and may expect the same errors.
    """
    async with Launcher(log_dir, hosts) as launcher:
        starts = launcher.trainer(model, trainer, generator=generator), launcher.generator(model, generator)
        yield await asyncio.gather(*starts)


_free_store_names: list[str] = []
"""Of stores that have ended: `controller.handles.store` says why they are used again."""


class Launcher:
    """Starts any number of trainers and generators. All of their processes have ended when its block is left.

        async with Launcher(log_dir, config.hosts) as launcher:
            trainer, reference, generator = await asyncio.gather(
                launcher.trainer(model, config.policy_config, generator=config.generator_config),
                launcher.reference(model, config.policy_config),
                launcher.generator(model, config.generator_config),
            )

    A call checks its arguments at once and takes the host's next free GPUs; the processes start with the next await.
    So several calls before an await are all checked before any process starts. A start that fails raises its error
    where it is awaited, and may be tried again; leaving the block cancels the other starts. Names appear in log file
    names and errors.

    If `TrainerConfig.lora` is set, a trainer is an adapter named "policy" over the frozen model, and so is what its
    generator samples from.
    """

    def __init__(self, log_dir: Path, hosts: Hosts | None = None, *, beside: "Launcher | None" = None) -> None:
        """The output of the processes goes to `<log_dir>/<name>-<rank>.log`. Without `hosts` they run on this host.

        A mesh runs on the group of hosts that has its name. Entering the block raises ValueError for hosts that cannot
        be used. `beside` is a running launcher whose GPUs, hosts and weight store this one shares; its trainer may push
        too.
        """
        self._root: Launcher = self if beside is None else beside._root
        self._log_dir = Path(log_dir)
        self._hosts = hosts
        self._assignments = Assignments(None if beside is None else beside._assignments)
        self._starts: list[asyncio.Task[object]] = []
        self._num_named = self._num_ready = 0  # trainers and generators: all, and started ones
        self._running: list[Stoppable] = []
        self._store_name = _free_store_names.pop() if _free_store_names else f"weights-{uuid.uuid4().hex}"
        self._store: asyncio.Task[WeightStore] | None = None
        self._running_store: WeightStore | None = None
        self._pushing_mesh: Mesh | None = None
        self._pushing_trainer: str | None = None
        self._version_records = VersionRecords()
        self._gpus = SharedGPUs()
        self._bases: list[tuple[Path, TrainerConfig, asyncio.Task[Trainer]]] = []
        self._pushed_base: Path | None = None  # of adapters that are pushed and pulled
        self._trainers: dict[str, tuple[TrainerHandle, Callable[[], Coroutine[Any, Any, TrainerHandle]]]] = {}

    async def __aenter__(self) -> Self:
        await self._assignments.connect(self._hosts)
        return self

    async def __aexit__(self, *_: object) -> None:
        for start in self._starts:
            start.cancel()
        # An impatient user interrupts this too, and a notebook's kernel lives on.
        await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(running.stop() for running in self._running))
        self._assignments.give_back()
        store = self._running_store
        if self._store is None or (store is not None and store.is_free):  # a start that was cut off leaves a directory
            _free_store_names.append(self._store_name)
        if self._hosts is not None:
            await self._assignments.disconnect()

    def trainer(
        self, model: Path, config: TrainerConfig, *, name: str = "trainer", generator: GeneratorConfig | None = None
    ) -> "asyncio.Task[Trainer]":
        """Starts a trainer: the policy or, under another `name`, its critic, its reference or its teacher.

        Weights are pushed in the dtype of `generator`, which pulls them; without it they cannot be pushed. Only one
        trainer can push: its optimizer steps number the versions. Its GPUs are `config.gpus`, by default the next free.
        With `config.lora` it is an adapter over the model; `Trainer.adapter` makes further ones.

        Raises ValueError if the model cannot be trained, or not in this layout, if the name is taken, for a second
        trainer that pushes, for too few GPUs, and if trainer and generator do not fit: one has adapters and the other
        has not, the rank is too high, or only one widens its output projection (`head_dtype`).
        """
        config = _with_model(config, model)
        if generator is not None:
            self._check_pushing(name)
            _with_model(generator, model).check_model()
            check_lora(config, generator)
            _check_alike(config, generator)
            self._pushed_base = check_same_base(config.lora, self._pushed_base, model)
        # Imported here, because it may load torch: other mistakes in a recipe should not have to wait for that.
        from trainer.engines.model_check import check_model

        # Other hosts are asked for their hardware when the trainer starts.
        is_here = self._assignments.has_gpu(name, is_trainer=True) is None
        limits = check_model(config if is_here else replace(config, compile=False, float8="none"))
        assignment = self._assignments.trainer(name, config)
        if generator is not None:
            self._weight_store()
            self._pushing_trainer = name
        start = partial(self._launch_trainer, config, generator, name, limits, assignment)
        base = self._begin(self._in_phase("train", config, start, assignment.gpus), name)
        if config.lora is None:
            return base
        self._bases.append((model, config, base))
        return self._begin(_adapter(base, config.lora))

    def reference(self, model: Path, config: TrainerConfig, *, name: str = "reference") -> "asyncio.Task[Trainer]":
        """The model before training, to compute log-probs with.

        If the policy is an adapter, this is the frozen model of its trainer, which takes no more memory. Otherwise a
        second trainer is started, with a frozen model.

        Raises ValueError as `trainer` does, and if `config.lora` is set and no trainer was started with `config`.
        """
        if config.lora is None:
            return self.trainer(model, replace(config, frozen=True), name=name)
        config = _with_model(config, model)
        for trained, as_configured, base in self._bases:
            if (trained, as_configured) == (model, config):
                return self._begin(_shared(base))
        raise ValueError(
            "reference: with `lora` it is the frozen model of the policy's trainer, and no trainer was started with "
            "this model and configuration; call `trainer` first, or leave `lora` out of the reference's configuration"
        )

    async def restart_trainer(self, name: str = "trainer") -> "TrainerHandle":
        """Starts a trainer in place of one whose processes died, as that one began: without its adapters and steps.

        Other processes of this launcher live on. Handles of the dead trainer keep raising `MeshError`.
        """
        dead, start = self._trainers[name]
        await dead.stop()
        self._running = [running for running in self._running if running is not dead]
        return await self._begin(start())

    async def _launch_trainer(
        self,
        config: TrainerConfig,
        generator: GeneratorConfig | None,
        name: str,
        limits: "ModelLimits",
        assignment: Assignment,
    ) -> "TrainerHandle":
        from controller.handles.trainer_handle import TrainerHandle

        await assignment.check_trainer(config)
        handle = await TrainerHandle.launch(
            config,
            None if generator is None else generator.dtype,
            self._log_dir,
            name=name,
            transport="auto" if generator is None else self._assignments.transport(generator.weight_transport),
            gpus=assignment.gpus,
            hosts=assignment.hosts,
            version_records=self._version_records,
            limits=limits,
            max_lora_rank=None if generator is None or generator.lora is None else generator.lora.max_rank,
            pushes_to=lambda: [] if (store := self._root._running_store) is None else store.needed,
            store_name=self._root._store_name,
            shared_gpus=self._gpus if config.placement == "colocated" else None,
        )
        self._running.append(handle)
        self._trainers[name] = handle, partial(self._launch_trainer, config, generator, name, limits, assignment)
        if generator is not None:
            self._pushing_mesh = handle.mesh
            await asyncio.shield(self._weight_store())  # a start that is cancelled must not cancel the store's
        return handle

    def generator(self, model: Path, config: GeneratorConfig, *, name: str = "generator") -> "asyncio.Task[Generator]":
        """Starts a `GeneratorRouter` over `config.num_replicas` generators. It restarts a generator that dies.

        Their GPUs are `config.gpus`, by default the next free. With `config.lora` it is bound to the adapter "policy".

        Raises ValueError if the model cannot be served so, for a name that is taken, and for too few GPUs.
        """
        if isinstance(config, OfflineGeneratorConfig):
            return self._begin(offline_generator())
        config = _with_model(config, model)
        config.check_model()
        self._pushed_base = check_same_base(config.lora, self._pushed_base, model)
        from controller.handles.generator_handle import GeneratorHandle
        from controller.handles.generator_router import GeneratorRouter
        from generator.options import check_hardware

        check_hardware(config, has_gpu=self._assignments.has_gpu(name, is_trainer=False))
        assignments = self._assignments.generators(name, config)
        store, alone = self._weight_store(), config.num_replicas == 1

        async def start_replica(index: int) -> GeneratorHandle:
            assignment = assignments[index] = await self._assignments.replaced(assignments[index], name, index, config)
            await assignment.check_model_directory(config.model)
            launch = partial(
                GeneratorHandle.launch,
                config,
                self._log_dir,
                name="evaluator" if index == config.num_replicas else name if alone else f"{name}-{index}",
                gpus=assignment.gpus,
                hosts=assignment.hosts,
                version_records=self._version_records,
                pulls_from=self._sources,
                store_name=self._root._store_name,
                shared_gpus=self._gpus if config.placement == "colocated" else None,
            )
            return await self._in_phase("sample", config, launch, assignment.gpus)

        async def start_evaluator() -> GeneratorHandle:
            self._running.append(evaluator := await start_replica(config.num_replicas))  # no router ends it
            return evaluator

        async def start() -> Generator:
            evaluator = self._begin(start_evaluator(), "evaluator") if config.evaluator else None
            router = await GeneratorRouter.launch(start_replica, config.num_replicas, on_failure=config.on_failure)
            self._running.append(router)
            router.evaluator = evaluator and await evaluator
            await (await asyncio.shield(store)).complete()  # a later generator may be on a further host
            return router if config.lora is None else BoundGenerator(router, POLICY)

        return self._begin(start(), name)

    def _sources(self) -> "list[Mesh]":
        """Of weights, as far as they run: the store, and the trainer that pushes."""
        store = self._root._running_store
        return [mesh for mesh in (store and store.mesh, self._pushing_mesh) if mesh is not None]

    async def _in_phase(
        self,
        side: Side,
        config: TrainerConfig | GeneratorConfig,
        start: Callable[[], Awaitable[T]],
        gpus: Sequence[str] | None,
    ) -> T:
        """Awaits a start. What is colocated starts when its side has the memory of the GPUs."""
        for mesh in self._sources() if side == "sample" else ():  # without them a generator could pull nothing
            mesh.check_alive("start")
        phase = self._gpus.phase(side) if config.placement == "colocated" else nullcontext()
        async with phase, self._gpus.starting(gpus):
            return await start()

    def _begin(self, start: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T]":
        """Begins a start. The end of a start with a name is shown to the user."""
        task = asyncio.create_task(start)
        self._starts.append(task)
        if name:
            self._num_named += 1
            task.add_done_callback(partial(self._start_ended, name))
        return task

    def _start_ended(self, name: str, start: "asyncio.Task[object]") -> None:
        if not start.cancelled() and start.exception() is None:
            self._num_ready += 1
            report_progress(f"{name} is ready", self._num_ready, self._num_named)
            return
        self._assignments.give_back(name)  # its processes have ended, and another start may follow
        self._bases = [base for base in self._bases if base[-1] is not start]
        self._pushing_trainer = None if self._pushing_trainer == name else self._pushing_trainer

    def _weight_store(self) -> "asyncio.Task[WeightStore]":
        """The start of the store that weights are published in. The first mesh that pushes or pulls begins it."""
        root, assignments = self._root, self._root._assignments

        async def start() -> "WeightStore":
            await asyncio.sleep(_OTHERS_FIRST_S)
            with without_garbage_collection():
                from controller.handles.store import WeightStore  # loads torch

            receivers = assignments.receivers(root._log_dir, root._store_name)
            root._running_store = running = await WeightStore.launch(
                root._log_dir, root._store_name, hosts=assignments.store(), receivers=receivers
            )
            root._running.append(running)
            return running

        root._store = root._store or root._begin(start())
        return root._store

    def _check_pushing(self, name: str) -> None:
        """Raises ValueError if another trainer pushes: both would number their versions from 0."""
        if (pushing := self._pushing_trainer) is not None:
            raise ValueError(f"generator of {name!r}: {pushing!r} pushes already, and only one trainer can")


def _check_alike(trainer: TrainerConfig, generator: GeneratorConfig) -> None:
    """Raises ValueError if one side computes by other kernels, or logits in float32, and the other is not asked to."""
    numerics = find_engine(trainer.engine).numerics
    if numerics != generator.numerics:
        raise ValueError(
            f"TrainerConfig.engine is {trainer.engine!r} and GeneratorConfig.numerics is {generator.numerics!r}, so "
            "that only one side computes bit by bit as the other would; a recipe's `numerics` sets both"
        )
    if numerics and trainer.compute_dtype != generator.dtype:
        raise ValueError(
            f"TrainerConfig.compute_dtype is {trainer.compute_dtype!r} and GeneratorConfig.dtype is "
            f"{generator.dtype!r}; with numerics {numerics!r} they must be the same"
        )
    ours, theirs = trainer.head_dtype or trainer.compute_dtype, generator.head_dtype or generator.dtype
    if ours != theirs and (trainer.head_dtype or generator.head_dtype):
        raise ValueError(
            f"TrainerConfig.head_dtype is {trainer.head_dtype!r} and GeneratorConfig.head_dtype is "
            f"{generator.head_dtype!r}, so that logits are computed in {ours} and in {theirs}; set both or neither"
        )


async def _adapter(base: "asyncio.Task[Trainer]", lora: LoRAConfig) -> Trainer:
    return await (await asyncio.shield(base)).adapter(POLICY, lora)


async def _shared(base: "asyncio.Task[Trainer]") -> Trainer:
    return await asyncio.shield(base)


def _with_model(config: Config, model: Path) -> Config:
    """The configuration for this model. Raises ValueError if it names another one."""
    if config.model not in (Path(), model):
        raise ValueError(f"{type(config).__name__}.model is {config.model}; leave it out, the loop's model is {model}")
    return replace(config, model=model)
