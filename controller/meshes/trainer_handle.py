"""`TrainerHandle`: a mesh of `PolicyTrainer` ranks as the `Trainer` that a controller script sees.

Checks a call before any rank computes, sends each data-parallel rank its local batch and merges the results. Calls
reach the ranks in the order in which they were issued, so several may be in flight.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from controller.meshes.mesh import Mesh, visible_gpus
from controller.meshes.version_records import VersionRecords
from rl.data.batching import BatchPlan, merge_metrics, plan_batch, validate_batch
from rl.losses import get_loss
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput, WeightTransport
from trainer.actor import PolicyTrainer, WeightDtype, trainer_env
from trainer.config import TrainerConfig
from trainer.engines.base import RankFailureError
from trainer.engines.model_check import ModelLimits, check_model

T = TypeVar("T")


class TrainerHandle:
    """Implements `rl.protocols.Trainer`."""

    def __init__(
        self, mesh: Mesh, config: TrainerConfig, version_records: VersionRecords, *, share_prefixes: bool, pushes: bool
    ) -> None:
        """Use `launch`."""
        self.mesh = mesh
        self._version_records = version_records
        self._pushes = pushes
        self.config = config
        self._share_prefixes = share_prefixes
        self._limits = check_model(config)

    @classmethod
    async def launch(
        cls,
        config: TrainerConfig,
        generator_dtype: WeightDtype | None,
        log_dir: Path,
        *,
        name: str = "trainer",
        transport: WeightTransport = "auto",
        gpus: Sequence[int] | None = None,
        version_records: VersionRecords | None = None,
    ) -> "TrainerHandle":
        """Starts the trainer's processes and waits until every rank has loaded the model.

        Weights are pushed in `generator_dtype` over `transport`, or never if it is None; every push is noted in
        `version_records`. `name` appears in log file names and errors. `gpus` are the host's GPUs to use, one per rank;
        by default all are visible. Raises ValueError, before any process starts, for a model or a layout that cannot
        be trained.
        """
        cls.check_model(config)
        mesh = await Mesh.spawn(
            name,
            PolicyTrainer,
            config,
            generator_dtype,
            transport,
            num_ranks=config.num_ranks,
            env={**trainer_env(config), **visible_gpus(gpus)},
            log_dir=log_dir,
        )
        try:
            share_prefixes: list[bool] = list((await mesh.answer(mesh.actors.shares_prefixes.call())).values())
        except BaseException:
            await mesh.stop()
            raise
        return cls(
            mesh,
            config,
            version_records or VersionRecords(),
            share_prefixes=all(share_prefixes),
            pushes=generator_dtype is not None,
        )

    @staticmethod
    def check_model(config: TrainerConfig) -> ModelLimits:
        """Raises ValueError for a model that cannot be trained, or not in this layout."""
        return check_model(config)

    async def stop(self) -> None:
        """Ends the trainer's processes. May be called again."""
        await self.mesh.stop()

    async def policy_version(self) -> int:
        """Optimizer steps applied so far."""
        return (await self._gather([rank.policy_version.call_one() for rank in self._ranks]))[0]

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, Any] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient.

        Raises ValueError for a loss or a batch that cannot be computed with, and whatever a custom loss raises; the
        accumulated gradient is as before then.
        """
        checked = get_loss(loss, loss_config)
        checked.check_head(self.config.head)
        plan = self._plan(batch, checked.required_inputs)
        calls = [
            rank.forward_backward.call_one(local_batch, loss, dict(loss_config or {}))
            for rank, local_batch in zip(self._ranks, self._local_batches(plan, batch), strict=True)
        ]
        return self._merge(plan, await self._gather(calls))

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Log-probs, and entropies if asked for, of the batch's target tokens, or a critic's values.

        Leaves no gradient. A frozen reference or reward model is a trainer that is only asked for this; it holds
        neither gradients nor optimizer state.

        Raises ValueError for a batch that cannot be computed with.
        """
        if entropy:
            self.config.check_entropy()
        plan = self._plan(batch, ())
        calls = [
            rank.forward.call_one(local_batch, entropy)
            for rank, local_batch in zip(self._ranks, self._local_batches(plan, batch), strict=True)
        ]
        return self._merge(plan, await self._gather(calls))

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Multiplies the accumulated gradient by `grad_scale`, clips it, applies one AdamW step, clears the gradient.

        Raises ValueError when no gradient was accumulated or `grad_scale` is not finite.
        """
        outputs = await self._gather([rank.optim_step.call_one(params, grad_scale) for rank in self._ranks])
        return replace(outputs[0], metrics=merge_metrics([output.metrics for output in outputs]))

    async def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        await self._gather([rank.zero_grad.call_one() for rank in self._ranks])

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Lets parameters, gradients or optimizer state rest on `device`, "cpu" or "cuda", from now on.

        A call brings in what it needs of what is elsewhere and puts it back afterwards. On trainers without an
        accelerator nothing moves. Raises ValueError when nothing is to be moved, or to a device that is not theirs.
        """
        await self._gather([rank.to.call_one(device, model, gradients, optimizer) for rank in self._ranks])

    async def push_model_state_dict(self) -> int:
        """Publishes the current weights in the generator's dtype; returns their policy version.

        Raises ValueError if the trainer was started without a generator, and for a critic, which none can sample from.
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
        record = (await self._gather([rank.push_model_state_dict.call_one() for rank in self._ranks]))[0]
        assert record is not None
        self._version_records.add(record)
        return record.version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version; `path` appears only once all of it is on disk.

        With `asynchronous` returns once the state is copied; `wait_for_checkpoint`, or the next save or load, waits for
        the rest. With `keep_last`, only that many checkpoints of the highest versions stay in the directory of `path`.
        Raises ValueError when `path` exists and is not ours, cannot be written or has too little room, and for a
        `keep_last` below 1.
        """
        await self._gather(
            [rank.save_checkpoint.call_one(path.absolute(), asynchronous, keep_last) for rank in self._ranks]
        )

    async def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written; raises what the last asynchronous one raised."""
        await self._gather([rank.wait_for_checkpoint.call_one() for rank in self._ranks])

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores what `save_checkpoint` wrote and drops any accumulated gradient; returns the policy version.

        With `weights_only` nothing but the parameters is taken over: the optimizer is reset, the version is 0.
        Raises ValueError when `path` is missing, damaged, not ours or of another model.
        """
        return (
            await self._gather([rank.load_checkpoint.call_one(path.absolute(), weights_only) for rank in self._ranks])
        )[0]

    async def export_hf(self, path: Path) -> None:
        """Writes a directory that transformers and vLLM load, with weights in the generator's dtype.

        Without a generator they are in the dtype of the trainer's matrix products.
        Raises ValueError as `save_checkpoint` does.
        """
        await self._gather([rank.export_hf.call_one(path.absolute()) for rank in self._ranks])

    @property
    def _ranks(self) -> list[Any]:
        return [self.mesh.rank(index) for index in range(self.config.num_ranks)]

    def _plan(self, batch: Sequence[Datum], required_inputs: Sequence[str]) -> BatchPlan:
        """Checks a batch and cuts it up."""
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
        """What each rank is sent; those that compute it together get the same."""
        local_batches = plan.split(batch)
        return [local_batches[self.config.data_parallel_rank(rank)] for rank in range(self.config.num_ranks)]

    def _merge(self, plan: BatchPlan, outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        """The ranks' outputs as one, in the order of the batch."""
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

    async def _gather(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        """Answers of all ranks. When some raise, the cause is raised and not a peer's complaint about it."""
        outcomes = await asyncio.gather(*(self.mesh.answer(call) for call in calls), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise next((error for error in errors if not isinstance(error, RankFailureError)), errors[0])
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
