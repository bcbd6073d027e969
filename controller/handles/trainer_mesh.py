"""`TrainerMesh`: the running processes of a trainer, and how a batch is split over them.

The handles of all policies of a trainer share one: the model's own, and that of each adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from controller.handles.colocated import SharedGPUs
from controller.handles.version_records import VersionRecords
from controller.processes.mesh import Mesh
from controller.processes.place import FilesHere, Place, RunFiles, gpu_env
from rl.data.batching import BatchPlan, merge_metrics, plan_batch, validate_batch
from rl.types import Datum, ForwardBackwardOutput, WeightTransport
from trainer.config import TrainerConfig, trainer_env
from trainer.engine_table import find_engine
from trainer.engines.model_check import ModelLimits, check_model

if TYPE_CHECKING:  # the import would load torch
    from trainer.actor import WeightDtype

ACTOR = "trainer.actor:PolicyTrainer"
"""The class of the ranks' actors. By its name, so that it is imported while the processes start."""


def _no_meshes() -> Sequence[Mesh]:
    """For trainers that do not know where weights go."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerMesh:
    """The ranks of one trainer."""

    mesh: Mesh
    config: TrainerConfig
    limits: ModelLimits
    version_records: VersionRecords
    """Every push adds to them."""
    share_prefixes: bool
    pushes: bool
    """Whether there is a generator that can pull."""
    matrix_rate: float = 0.0
    """Operations a second that one rank's device can do, as `trainer.matrix_rate` measured; 0 if it is not known."""
    max_lora_rank: int | None = None
    """The largest rank of an adapter that the generator serves, if it is known."""
    files: RunFiles = field(default_factory=FilesHere)
    """Where ranks write checkpoints and models, and read them."""
    pushes_to: Callable[[], Sequence[Mesh]] = _no_meshes
    """The meshes without which no version can be pushed."""
    gpus: SharedGPUs | None = None
    """The GPUs that a colocated trainer shares with a generator."""

    def __post_init__(self) -> None:
        """Has the mesh distinguish a rank's own error from the errors that it caused on other ranks."""
        self.mesh.calls.is_consequence = _is_consequence

    @classmethod
    async def launch(
        cls,
        config: TrainerConfig,
        generator_dtype: "WeightDtype | None",
        log_dir: Path,
        *,
        name: str = "trainer",
        transport: WeightTransport = "auto",
        gpus: Sequence[str] | None = None,
        hosts: Place | None = None,
        version_records: VersionRecords | None = None,
        limits: ModelLimits | None = None,
        max_lora_rank: int | None = None,
        pushes_to: Callable[[], Sequence[Mesh]] = _no_meshes,
        store_name: str | None = None,
        shared_gpus: SharedGPUs | None = None,
    ) -> "TrainerMesh":
        """Starts the trainer's processes and waits until every rank has loaded the model.

        Weights are pushed in `generator_dtype` over `transport` to the TorchStore named `store_name`; without both they
        cannot be. `name` is for log file names and errors. `gpus` are this host's, one per rank; by default all.
        `hosts` are other hosts to run on. `limits` is `check_model(config)`, if it is known already.
        A colocated trainer shares `shared_gpus`.

        Raises ValueError, before any process starts, if the model cannot be trained, or not in this layout.
        """
        limits = limits or check_model(config)
        mesh = await Mesh.spawn(
            *(name, ACTOR, config, generator_dtype, transport, store_name),
            num_ranks=config.num_ranks,
            env={**trainer_env(config, has_gpu=None if hosts is None else hosts.has_gpu), **gpu_env(gpus)},
            log_dir=log_dir,
            deadlines=config.deadlines,
            hosts=hosts,
            loads=[find_engine(config.engine).engine.partition(":")[0]],
        )
        share_prefixes, rate = await _traits(mesh)
        return cls(
            mesh=mesh,
            config=config,
            limits=limits,
            version_records=version_records or VersionRecords(),
            share_prefixes=share_prefixes,
            matrix_rate=rate,
            pushes=generator_dtype is not None,
            max_lora_rank=max_lora_rank,
            files=mesh.place.files(config.num_ranks),
            pushes_to=pushes_to,
            gpus=shared_gpus,
        )

    def share_gpus(self, policy: str | None) -> "PolicyMemory | None":
        """Has a policy give up its memory in the phases of a colocated generator. It has its memory now."""
        if self.gpus is None:
            return None
        memory = PolicyMemory(self.mesh, policy)
        self.gpus.join("train", memory)
        return memory

    def check(self, batch: Sequence[Datum], required_inputs: Sequence[str]) -> None:
        """Raises ValueError if this trainer cannot compute a batch."""
        validate_batch(
            batch,
            required_inputs=required_inputs,
            vocab_size=self.limits.vocab_size,
            max_seq_len=self.limits.max_seq_len,
            experts=self.limits.experts,
            reads_images=self.limits.reads_images,
        )
        if batch[0].routes is not None:
            self.config.check_routes()

    def plan(self, batch: Sequence[Datum]) -> BatchPlan:
        """Splits a batch over data-parallel ranks and micro-batches."""
        return plan_batch(
            batch,
            num_ranks=self.config.num_data_parallel_ranks,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
            share_prefixes=self.share_prefixes,
        )

    def local_batches(self, plan: BatchPlan, batch: Sequence[Datum]) -> list[list[list[Datum]]]:
        """The micro-batches of every rank. Ranks of one data-parallel group (TP, PP, CP) get the same ones."""
        local_batches = plan.split([_plain(datum) for datum in batch])
        return [local_batches[self.config.data_parallel_rank(rank)] for rank in range(self.config.num_ranks)]

    def merge(self, plan: BatchPlan, outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        """The ranks' outputs as one, in the order of the batch."""
        # Ranks of one data-parallel group return the same output: that of the first one counts, or metrics would be
        # summed several times.
        owners = [self.config.data_parallel_rank(rank) for rank in range(self.config.num_ranks)]
        parts = [outputs[owners.index(local_batch)] for local_batch in range(self.config.num_data_parallel_ranks)]
        entropies = [part.entropy for part in parts if part.entropy is not None]
        values = [part.values for part in parts if part.values is not None]
        metrics = merge_metrics([part.metrics for part in parts])
        if "model_flops" in metrics:
            metrics["peak_flops"] = metrics["seconds_engine_max"] * self.matrix_rate * self.config.num_ranks
        return ForwardBackwardOutput(
            logprobs=() if values else plan.restore([part.logprobs for part in parts]),
            values=plan.restore(values) if values else None,
            entropy=plan.restore(entropies) if entropies else None,
            metrics=metrics,
        )


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """What one policy has in the memory of colocated GPUs. A `controller.handles.colocated.Member`."""

    mesh: Mesh
    policy: str | None

    async def take_memory(self) -> None:
        """Moves parameters and gradients to the GPUs. The optimizer state stays on the host, and is used in pieces."""
        await self._move("cuda", optimizer=False)

    async def free_memory(self) -> None:
        """Moves everything to the host."""
        await self._move("cpu", optimizer=True)

    async def _move(self, device: str, *, optimizer: bool) -> None:
        arguments = [(self.policy, device, True, True, optimizer)] * self.mesh.num_ranks
        await self.mesh.call("to", arguments, needs_memory=False)


def _plain(datum: Datum) -> Datum:
    """The datum without types of the user's, which one rank might not know while the others compute."""
    arrays = (datum.tokens, *datum.loss_inputs.values())
    if type(datum) is Datum and type(datum.loss_inputs) is dict and all(type(each) is np.ndarray for each in arrays):
        return datum
    inputs = {str(name): np.asarray(array) for name, array in datum.loss_inputs.items()}
    return replace(
        Datum(tokens=np.asarray(datum.tokens), loss_inputs=inputs),
        temperature=float(datum.temperature),
        kept=datum.kept,
        routes=datum.routes,
        images=datum.images,
    )


async def _traits(mesh: Mesh) -> tuple[bool, float]:
    """Waits until every rank is ready. Whether all of them share prefixes, and the rate of the first one's device.

    A mesh that fails is stopped.
    """
    try:
        shares = await mesh.answers([mesh.rank(i).shares_prefixes.call_one() for i in range(mesh.num_ranks)], "start")
        return all(shares), await mesh.answer(mesh.rank(0).matrix_rate.call_one(), "start", rank=0)
    except BaseException:
        await mesh.stop()
        raise


def _is_consequence(error: BaseException) -> bool:
    from trainer.engines.base import RankFailureError  # loads torch

    return isinstance(error, RankFailureError)
