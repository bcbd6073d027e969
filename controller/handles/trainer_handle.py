"""`TrainerHandle`: one policy of a mesh of `PolicyTrainer` ranks as the `Trainer` that a controller script sees.

    loop --- batch ---> TrainerHandle: checks, plans --- local batches ---> Mesh.call --- bytes ---> ranks
    loop <-- output --- TrainerMesh.merge          <--- outputs of all ranks, or the error that caused a failure

The handle checks a call before any rank computes, sends each data-parallel rank its local batch and merges the results.
A thread does what takes long, so a large batch does not block the event loop; its arrays must not change during the
call. Calls of all policies reach the ranks in the order in which they were issued, so several may be in flight.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from controller.handles.trainer_mesh import TrainerMesh
from rl.data.batching import BatchPlan, checked_data, merge_metrics
from rl.lora import LoRAConfig, check_adapter_name
from rl.losses import get_loss
from rl.protocols import Trainer
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput


class TrainerHandle:
    """Implements `rl.protocols.Trainer` for the model itself, or for one adapter over it."""

    def __init__(self, trainer: TrainerMesh, policy: str | None = None) -> None:
        """`policy` is the name of an adapter that exists; None is the model itself."""
        self.mesh = trainer.mesh
        self.config = trainer.config
        self.policy = policy
        self._trainer = trainer
        self._dropped = False
        self._memory = trainer.share_gpus(policy)
        self._push_bytes_per_s: float | None = None
        self._collecting: asyncio.Task[None] | None = None  # what the ranks write in the background

    async def stop(self) -> None:
        """Ends the trainer's processes. May be called again."""
        self._stop_collecting()
        await self.mesh.stop()

    async def policy_version(self) -> int:
        """The number of optimizer steps applied so far."""
        return (await self._call("policy_version", needs_memory=False))[0]

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, Any] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient.

        Raises ValueError for an invalid loss or batch, and any exception that a custom loss raises. The accumulated
        gradient is then as it was before the call.
        """
        checked = get_loss(loss, loss_config)
        checked.check_head(self.config.head)
        return await self._compute("forward_backward", batch, checked, checked.required_inputs, checked.prepared)

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Computes log-probs of the batch's target tokens, and entropies if asked to, or a critic's values.

        Leaves no gradient. A frozen reference or reward model is a trainer on which only `forward` is called; it then
        holds neither gradients nor optimizer state.

        Raises ValueError for an invalid batch.
        """
        if entropy:
            self.config.check_entropy()
        return await self._compute("forward", batch, entropy)

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Multiplies the accumulated gradient by `grad_scale`, clips it, applies one step, and clears the gradient.

        The step is AdamW's, or that of `MuonParams`. Raises ValueError if no gradient was accumulated, `grad_scale` is
        not finite, a pattern of `learning_rate_multipliers` matches no parameter, or the engine has no such step.
        """
        self.config.check_optimizer(params)
        if not isinstance(grad_scale, Real) or isinstance(grad_scale, bool):  # NumPy's are such numbers too
            raise ValueError(f"grad_scale is {grad_scale!r}; it must be a number")
        outputs = await self._call("optim_step", params, float(grad_scale))
        metrics = merge_metrics([output.metrics for output in outputs])
        if self._push_bytes_per_s is not None:
            metrics["push_bytes_per_s"] = self._push_bytes_per_s
        return replace(outputs[0], metrics=metrics)

    async def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        await self._call("zero_grad")

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Offloads parameters, gradients or optimizer state to `device` ("cpu"), or moves them back ("cuda").

        Offloaded state is moved to the device for each call and back afterwards. A trainer that computes on the CPU
        moves nothing. A colocated trainer has its parameters and gradients on the GPU again in its next phase. Raises
        ValueError if nothing is chosen, and for another device.
        """
        await self._call("to", device, model, gradients, optimizer)

    async def push_model_state_dict(self) -> int:
        """Publishes the current weights in the generator's dtype and returns their policy version.

        An adapter is published as its own small tensors, and numbers its versions itself.

        Raises ValueError if the trainer was started without a generator, for a critic, because a generator cannot
        sample from a value head, and for a frozen base, because generators have it already.
        """
        if self.config.head != "lm":
            raise ValueError(
                f"push_model_state_dict: generators sample from head='lm'; this trainer has head={self.config.head!r}"
            )
        if not self._trainer.pushes:
            raise ValueError(
                f"push_model_state_dict: {self.mesh.name!r} was started without a generator that could pull; give "
                "`generator=` when starting it"
            )
        if self.policy is None and self.config.is_frozen:
            raise ValueError(
                "push_model_state_dict: the base is frozen, so generators have it from its directory; push an adapter"
            )
        start = time.perf_counter()
        record = (await self._call("push_model_state_dict", needs=self._trainer.pushes_to))[0]
        assert record is not None
        self._push_bytes_per_s = sum(spec.nbytes for spec in record.manifest) / (time.perf_counter() - start)
        self._trainer.version_records.add(record)
        return record.version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version. `path` appears only when everything is on disk.

        If `asynchronous`, returns as soon as the state is copied; `wait_for_checkpoint`, or the next save or load,
        waits until it is written. With `keep_last`, deletes all but that many checkpoints in its directory, this one
        and the ones of the highest versions.

        Hosts that do not share its folder write beside `path` on their own disk, and the controller collects the files.

        Raises ValueError if `path` exists and is not a checkpoint of ours or cannot be written, and for a `keep_last`
        below 1; and OSError, which names `path`, if there is too little room or the disk fails.
        """
        self._check_not_dropped()
        files = self._trainer.files
        if self._collecting is not None:
            await self.wait_for_checkpoint()
        there = await files.to_write(path)
        await self._call("save_checkpoint", there, asynchronous, keep_last, varies=True)
        if there != Path(path).absolute():
            self._collecting = asyncio.create_task(files.collect(path, keep_last))
            if not asynchronous:
                await self.wait_for_checkpoint()

    async def wait_for_checkpoint(self) -> None:
        """Returns once no checkpoint is being written. Raises the error of the last asynchronous save, if it failed."""
        self._check_not_dropped()
        try:
            await self._call("wait_for_checkpoint", varies=True, needs_memory=False)
        except Exception:
            self._stop_collecting()
            raise
        if (collecting := self._collecting) is not None:
            try:
                await asyncio.shield(collecting)  # a caller that is cancelled while it waits may want it later
            finally:
                if collecting.done():
                    self._collecting = None

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores a checkpoint, drops any accumulated gradient and returns the policy version.

        With `weights_only`, restores the parameters alone: the optimizer is reset and the version is 0.
        Raises ValueError if `path` is missing, damaged, not a checkpoint of ours, or one of another model.
        """
        async with self._trainer.files.to_read(path) as paths:
            arguments = [(there, weights_only) for there in paths]
            return (await self._call_each("load_checkpoint", arguments, varies=True))[0]

    async def export_hf(self, path: Path) -> None:
        """Writes a model directory that transformers and vLLM can load, with weights in the generator's dtype.

        Without a generator, the weights are in the trainer's `compute_dtype`. An adapter is merged into the base there;
        the adapter itself, as of `export_peft`, is in `adapter` within `path`.

        Raises ValueError and OSError as `save_checkpoint`.
        """
        there = await self._trainer.files.to_write(path)
        await self._call("export_hf", there, varies=True)
        await self._trainer.files.collect(path)

    async def adapter(self, name: str, config: LoRAConfig) -> "Trainer":
        """Makes a LoRA adapter over this trainer's frozen base, and returns its handle.

        Raises ValueError if the trainer was started without `TrainerConfig.lora`, for a name that is taken or not
        allowed, a rank above the generator's, modules that the model lacks, and too little memory. Everything else is
        then as it was.
        """
        check_adapter_name(name)
        trainer = self._trainer
        if self.config.lora is None:
            raise ValueError(
                f"adapter: {self.mesh.name!r} trains all of its parameters; start it with `TrainerConfig.lora` set, "
                "which freezes them"
            )
        if trainer.max_lora_rank is not None and config.rank > trainer.max_lora_rank:
            raise ValueError(
                f"adapter {name!r}: rank is {config.rank}; the generator serves ranks up to {trainer.max_lora_rank} "
                "(GeneratorConfig.lora.max_rank)"
            )
        await self.mesh.call("adapter", [(name, config)] * self.config.num_ranks, varies=True)
        return TrainerHandle(trainer, name)

    async def drop(self) -> None:
        """Frees an adapter: parameters, gradient, optimizer state and published weights. Later calls are refused.

        Calls that were issued before are executed first. Raises ValueError if this is not an adapter.
        """
        policy, trainer = self._adapter_name("drop"), self._trainer
        self._check_not_dropped()
        self._dropped = True
        await self.mesh.call("drop", [(policy,)] * self.config.num_ranks, varies=True)
        trainer.version_records.forget(policy)
        if trainer.gpus is not None and self._memory is not None:
            trainer.gpus.leave(self._memory)

    async def export_peft(self, path: Path) -> None:
        """Writes an adapter as a directory that `peft` and vLLM can load, in float32.

        Raises ValueError if this is not an adapter, and as `save_checkpoint`.
        """
        self._adapter_name("export_peft")
        there = await self._trainer.files.to_write(path)
        await self._call("export_peft", there, varies=True)
        await self._trainer.files.collect(path)

    def _own_routes(self, batch: Sequence[Datum]) -> Sequence[Datum]:
        """The batch without routes, which are another model's, if this is a reference, a teacher or a critic."""
        is_policy = self.config.head == "lm" and (self.policy is not None or not self.config.is_frozen)
        if is_policy or all(datum.routes is None for datum in batch):
            return batch
        return [replace(datum, routes=None) for datum in batch]

    async def _compute(
        self,
        verb: str,
        batch: Sequence[Datum],
        option: Any,
        required_inputs: Sequence[str] = (),
        prepared: Callable[[Sequence[Datum]], Sequence[Datum]] = tuple,
    ) -> ForwardBackwardOutput:
        """Sends each data-parallel rank its local batch and `option`. A thread checks, plans and pickles the batch."""
        self._check_not_dropped()
        trainer, batch, plans = self._trainer, checked_data(batch), list[BatchPlan]()

        def arguments() -> list[tuple[Any, ...]]:
            own = self._own_routes(batch)
            trainer.check(own, required_inputs)
            plans.append(trainer.plan(ready := prepared(own)))
            return [(self.policy, local_batch, option) for local_batch in trainer.local_batches(plans[0], ready)]

        outputs = await self.mesh.call(verb, arguments, size=lambda: sum(len(datum.tokens) for datum in batch))
        return trainer.merge(plans[0], outputs)

    async def _call(self, verb: str, *args: Any, **options: Any) -> list[Any]:
        """The answers of all ranks to a call about this policy, with the same arguments. See `Mesh.call`."""
        return await self._call_each(verb, [args] * self.config.num_ranks, **options)

    async def _call_each(self, verb: str, arguments: Sequence[tuple[Any, ...]], **options: Any) -> list[Any]:
        """The same, with the arguments of each rank. Raises ValueError if the policy was dropped."""
        self._check_not_dropped()
        return await self.mesh.call(verb, [(self.policy, *args) for args in arguments], **options)

    def _check_not_dropped(self) -> None:
        if self._dropped:
            raise ValueError(f"adapter {self.policy!r} of {self.mesh.name!r} was dropped; `adapter` makes a new one")

    def _stop_collecting(self) -> None:
        """Ends a collection. Files that have not arrived are not visible."""
        collecting, self._collecting = self._collecting, None
        if collecting is not None and not collecting.cancel():
            collecting.exception()  # asyncio complains about exceptions that are never looked at

    def _adapter_name(self, verb: str) -> str:
        if self.policy is None:
            raise ValueError(f"{verb}: this is the trainer of the model itself; only an adapter has this call")
        return self.policy
