"""`TrainerHandle`: a mesh of `PolicyTrainer` ranks as the `Trainer` that a controller script sees.

The handle checks a call before any rank computes, sends each data-parallel rank its local batch and merges the results.
Calls reach the ranks in the order in which they were issued, so several may be in flight.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from controller.meshes.gpus import gpu_env
from controller.meshes.mesh import Mesh
from controller.meshes.version_records import VersionRecords
from rl.data.batching import BatchPlan, merge_metrics, plan_batch, validate_batch
from rl.losses import get_loss
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput, WeightTransport
from trainer.actor import PolicyTrainer, WeightDtype, trainer_env
from trainer.config import TrainerConfig
from trainer.engines.base import RankFailureError
from trainer.engines.model_check import ModelLimits, check_model

T = TypeVar("T")


def _no_meshes() -> Sequence[Mesh]:
    """For handles that do not know where weights go."""
    return ()


class TrainerHandle:
    """Implements `rl.protocols.Trainer`."""

    def __init__(
        self,
        mesh: Mesh,
        config: TrainerConfig,
        limits: ModelLimits,
        version_records: VersionRecords,
        *,
        share_prefixes: bool,
        pushes: bool,
        pushes_to: Callable[[], Sequence[Mesh]] = _no_meshes,
    ) -> None:
        """Use `launch`."""
        self.mesh = mesh
        mesh.calls.is_consequence = _is_consequence
        self.config = config
        self._limits = limits
        self._version_records = version_records
        self._share_prefixes = share_prefixes
        self._pushes = pushes
        self._pushes_to = pushes_to

    @classmethod
    async def launch(
        cls,
        config: TrainerConfig,
        generator_dtype: WeightDtype | None,
        log_dir: Path,
        *,
        name: str = "trainer",
        transport: WeightTransport = "auto",
        gpus: Sequence[str] | None = None,
        version_records: VersionRecords | None = None,
        limits: ModelLimits | None = None,
        pushes_to: Callable[[], Sequence[Mesh]] = _no_meshes,
    ) -> "TrainerHandle":
        """Starts the trainer's processes and waits until every rank has loaded the model.

        Weights are pushed in `generator_dtype` over `transport`; with a `generator_dtype` of None they cannot be
        pushed. Every push adds to `version_records`. `name` appears in log file names and errors. `gpus` are the GPUs
        of this host to use, one per rank; by default every rank sees all of them. `limits` is the result of
        `check_model(config)`, for a caller that has checked the model already. `pushes_to` returns the meshes without
        which no version can be pushed.

        Raises ValueError, before any process starts, if the model cannot be trained, or not in this layout.
        """
        limits = limits or check_model(config)
        mesh = await Mesh.spawn(
            name,
            PolicyTrainer,
            config,
            generator_dtype,
            transport,
            num_ranks=config.num_ranks,
            env={**trainer_env(config), **gpu_env(gpus)},
            log_dir=log_dir,
            deadlines=config.deadlines,
        )
        try:
            calls = [mesh.rank(index).shares_prefixes.call_one() for index in range(config.num_ranks)]
            share_prefixes: list[bool] = await mesh.answers(calls, "start")
        except BaseException:
            await mesh.stop()
            raise
        return cls(
            mesh,
            config,
            limits,
            version_records or VersionRecords(),
            share_prefixes=all(share_prefixes),
            pushes=generator_dtype is not None,
            pushes_to=pushes_to,
        )

    async def stop(self) -> None:
        """Ends the trainer's processes. May be called again."""
        await self.mesh.stop()

    async def policy_version(self) -> int:
        """The number of optimizer steps applied so far."""
        return (await self._gather("policy_version", [rank.policy_version.call_one() for rank in self._ranks]))[0]

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, Any] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient.

        Raises ValueError for an invalid loss or batch, and any exception that a custom loss raises. The accumulated
        gradient is then as it was before the call.
        """
        checked = get_loss(loss, loss_config)
        checked.check_head(self.config.head)
        plan = self._plan(batch, checked.required_inputs)
        calls = [
            rank.forward_backward.call_one(local_batch, checked)
            for rank, local_batch in zip(self._ranks, self._local_batches(plan, batch), strict=True)
        ]
        return self._merge(plan, await self._gather("forward_backward", calls, num_tokens=_num_tokens(batch)))

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Computes log-probs of the batch's target tokens, and entropies if asked to, or a critic's values.

        Leaves no gradient. A frozen reference or reward model is a trainer on which only `forward` is called; it then
        holds neither gradients nor optimizer state.

        Raises ValueError for an invalid batch.
        """
        if entropy:
            self.config.check_entropy()
        plan = self._plan(batch, ())
        calls = [
            rank.forward.call_one(local_batch, entropy)
            for rank, local_batch in zip(self._ranks, self._local_batches(plan, batch), strict=True)
        ]
        return self._merge(plan, await self._gather("forward", calls, num_tokens=_num_tokens(batch)))

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Multiplies the accumulated gradient by `grad_scale`, clips it, applies one AdamW step, clears the gradient.

        Raises ValueError if no gradient was accumulated, `grad_scale` is not finite, or a pattern of
        `learning_rate_multipliers` matches no parameter.
        """
        outputs = await self._gather(
            "optim_step", [rank.optim_step.call_one(params, grad_scale) for rank in self._ranks]
        )
        return replace(outputs[0], metrics=merge_metrics([output.metrics for output in outputs]))

    async def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        await self._gather("zero_grad", [rank.zero_grad.call_one() for rank in self._ranks])

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Offloads parameters, gradients or optimizer state to `device` ("cpu"), or moves them back ("cuda").

        Offloaded state is moved to the device for each call and back afterwards. A trainer that computes on the CPU
        moves nothing. Raises ValueError if nothing is chosen, and for another device.
        """
        await self._gather("to", [rank.to.call_one(device, model, gradients, optimizer) for rank in self._ranks])

    async def push_model_state_dict(self) -> int:
        """Publishes the current weights in the generator's dtype and returns their policy version.

        Raises ValueError if the trainer was started without a generator, and for a critic: a generator cannot sample
        from a value head.
        """
        if self.config.head != "lm":
            raise ValueError(
                f"push_model_state_dict: generators sample from head='lm'; this trainer has head={self.config.head!r}"
            )
        if not self._pushes:
            raise ValueError(
                f"push_model_state_dict: {self.mesh.name!r} was started without a generator that could pull; give "
                "`generator=` when starting it"
            )
        calls = [rank.push_model_state_dict.call_one() for rank in self._ranks]
        record = (await self.mesh.answers(calls, "push_model_state_dict", needs=self._pushes_to()))[0]
        assert record is not None
        self._version_records.add(record)
        return record.version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version. `path` appears only when everything is on disk.

        If `asynchronous`, returns as soon as the state is copied; `wait_for_checkpoint`, or the next save or load,
        waits until it is written. With `keep_last`, deletes all but that many checkpoints of the highest versions in
        the parent directory of `path`.

        Raises ValueError if `path` exists and is not a checkpoint of ours, cannot be written or has too little room,
        and for a `keep_last` below 1.
        """
        await self._gather(
            "save_checkpoint",
            [rank.save_checkpoint.call_one(path.absolute(), asynchronous, keep_last) for rank in self._ranks],
            varies=True,
        )

    async def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written. Raises the error of the last asynchronous save, if it failed."""
        await self._gather(
            "wait_for_checkpoint", [rank.wait_for_checkpoint.call_one() for rank in self._ranks], varies=True
        )

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores a checkpoint, drops any accumulated gradient and returns the policy version.

        With `weights_only`, restores the parameters alone: the optimizer is reset and the version is 0.
        Raises ValueError if `path` is missing, damaged, not a checkpoint of ours, or one of another model.
        """
        return (
            await self._gather(
                "load_checkpoint",
                [rank.load_checkpoint.call_one(path.absolute(), weights_only) for rank in self._ranks],
                varies=True,
            )
        )[0]

    async def export_hf(self, path: Path) -> None:
        """Writes a model directory that transformers and vLLM can load, with weights in the generator's dtype.

        Without a generator, the weights are in the trainer's `compute_dtype`.
        Raises ValueError for the same paths as `save_checkpoint`.
        """
        await self._gather("export_hf", [rank.export_hf.call_one(path.absolute()) for rank in self._ranks], varies=True)

    @property
    def _ranks(self) -> list[Any]:
        return [self.mesh.rank(index) for index in range(self.config.num_ranks)]

    def _plan(self, batch: Sequence[Datum], required_inputs: Sequence[str]) -> BatchPlan:
        """Checks a batch and splits it over data-parallel ranks and micro-batches."""
        validate_batch(
            batch,
            required_inputs=required_inputs,
            vocab_size=self._limits.vocab_size,
            max_seq_len=self._limits.max_seq_len,
        )
        return plan_batch(
            batch,
            num_ranks=self.config.num_data_parallel_ranks,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
            share_prefixes=self._share_prefixes,
        )

    def _local_batches(self, plan: BatchPlan, batch: Sequence[Datum]) -> list[list[list[Datum]]]:
        """The micro-batches of every rank. Ranks of one data-parallel group (TP, PP, CP) get the same ones."""
        local_batches = plan.split(batch)
        return [local_batches[self.config.data_parallel_rank(rank)] for rank in range(self.config.num_ranks)]

    def _merge(self, plan: BatchPlan, outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        """The ranks' outputs as one, in the order of the batch."""
        # Ranks of one data-parallel group return the same output: that of the first one counts, or metrics would be
        # summed several times.
        owners = [self.config.data_parallel_rank(rank) for rank in range(self.config.num_ranks)]
        parts = [outputs[owners.index(local_batch)] for local_batch in range(self.config.num_data_parallel_ranks)]
        entropies = [part.entropy for part in parts if part.entropy is not None]
        values = [part.values for part in parts if part.values is not None]
        return ForwardBackwardOutput(
            logprobs=() if values else plan.restore([part.logprobs for part in parts]),
            values=plan.restore(values) if values else None,
            entropy=plan.restore(entropies) if entropies else None,
            metrics=merge_metrics([part.metrics for part in parts]),
        )

    async def _gather(
        self, verb: str, calls: Sequence[Awaitable[T]], *, num_tokens: int = 0, varies: bool = False
    ) -> list[T]:
        """The answers of all ranks. Raises the error that caused a failure, not another rank's `RankFailureError`.

        The calls were sent when they were created, before any await, so that all ranks get them in the order of issue.
        """
        return await self.mesh.answers(calls, verb, size=num_tokens, varies=varies)


def _num_tokens(batch: Sequence[Datum]) -> int:
    return sum(len(datum.tokens) for datum in batch)


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, RankFailureError)
