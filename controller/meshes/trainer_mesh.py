"""`TrainerMesh`: the running processes of a trainer, and how a batch is split over them.

The handles of all policies of a trainer share one: the model's own, and that of each adapter.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from controller.meshes.gpus import gpu_env
from controller.meshes.mesh import Mesh
from controller.meshes.place import Place
from controller.meshes.run_files import RunFiles
from controller.meshes.version_records import VersionRecords
from rl.data.batching import BatchPlan, merge_metrics, plan_batch, validate_batch
from rl.types import Datum, ForwardBackwardOutput, WeightTransport
from trainer.config import TrainerConfig, trainer_env
from trainer.engine_table import find_engine
from trainer.engines.model_check import ModelLimits, check_model

if TYPE_CHECKING:  # the import would load torch
    from trainer.actor import WeightDtype

T = TypeVar("T")

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
    files: RunFiles = field(default_factory=RunFiles)
    """Where ranks write checkpoints and models, and read them."""
    pushes_to: Callable[[], Sequence[Mesh]] = _no_meshes
    """The meshes without which no version can be pushed."""

    def __post_init__(self) -> None:
        """Has the mesh tell a rank's own error from those that it caused."""
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
    ) -> "TrainerMesh":
        """Starts the trainer's processes and waits until every rank has loaded the model.

        Weights are pushed in `generator_dtype` over `transport` to the TorchStore named `store_name`; without both they
        cannot be. `name` is for log file names and errors. `gpus` are this host's, one per rank; by default all.
        `hosts` are other hosts to run on. `limits` is `check_model(config)`, if it is known already.

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
            files=RunFiles(mesh.place, config.num_ranks),
            pushes_to=pushes_to,
        )

    @property
    def ranks(self) -> list[Any]:
        """The actor of each rank."""
        return [self.mesh.rank(index) for index in range(self.config.num_ranks)]

    async def gather(
        self, verb: str, calls: Sequence[Awaitable[T]], *, num_tokens: int = 0, varies: bool = False
    ) -> list[T]:
        """The answers of all ranks. Raises the error that caused a failure, not another rank's `RankFailureError`.

        The calls were sent when they were created, before any await, so that all ranks get them in the order of issue.
        """
        return await self.mesh.answers(calls, verb, size=num_tokens, varies=varies)

    def plan(self, batch: Sequence[Datum], required_inputs: Sequence[str]) -> BatchPlan:
        """Checks a batch and splits it over data-parallel ranks and micro-batches."""
        validate_batch(
            batch,
            required_inputs=required_inputs,
            vocab_size=self.limits.vocab_size,
            max_seq_len=self.limits.max_seq_len,
        )
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


def _plain(datum: Datum) -> Datum:
    """The datum without types of the user's, which one rank might not know while the others compute."""
    arrays = (datum.tokens, *datum.loss_inputs.values())
    if type(datum) is Datum and type(datum.loss_inputs) is dict and all(type(each) is np.ndarray for each in arrays):
        return datum
    inputs = {str(name): np.asarray(array) for name, array in datum.loss_inputs.items()}
    return Datum(tokens=np.asarray(datum.tokens), loss_inputs=inputs)


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
