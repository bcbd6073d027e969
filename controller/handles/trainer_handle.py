"""`TrainerHandle`: one policy of a mesh of `PolicyTrainer` ranks as the `Trainer` that a controller script sees.

    loop --- batch ---> TrainerHandle: checks, plans --- local batches ---> Mesh.call --- bytes ---> ranks
    loop <-- output --- merges                       <--- outputs of all ranks, or the error that caused a failure

The handle checks a call before any rank computes, sends each data-parallel rank its local batch and merges the results.
A thread does what takes long, so a large batch does not block the event loop; its arrays must not change during the
call. Calls of all policies reach the ranks in the order in which they were issued, so several may be in flight.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.handles.colocated import SharedGPUs
from controller.processes.mesh import Mesh
from controller.processes.place import Place, RunFiles, gpu_env
from rl.data.batching import BatchPlan, checked_data, merge_metrics, plain_datum, plan_batch, validate_batch
from rl.data.packing import ModelFlops
from rl.lora import LoRAConfig, check_adapter_name
from rl.losses import Loss, get_loss
from rl.protocols import Trainer
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput, WeightTransport
from rl.weights.version import VersionRecords
from trainer.config import TrainerConfig, trainer_env
from trainer.engine_table import find_engine
from trainer.engines.model_check import ModelLimits, check_model

if TYPE_CHECKING:  # the import would load torch
    from trainer.actor import WeightDtype

ACTOR = "trainer.actor:PolicyTrainer"
"""The class of the ranks' actors. By its name, so that it is imported while the processes start."""


@dataclass(kw_only=True, eq=False)
class TrainerHandle:
    """Implements `rl.protocols.Trainer` for the model itself, or for one adapter over it. The protocol has the verbs.

    The handles of all policies of a trainer have the same processes. Every call raises ValueError once the adapter was
    dropped, and `MeshError` if processes died or hang.
    """

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
    pushes_to: Callable[[], Sequence[Mesh]] = tuple
    """The meshes without which no version can be pushed."""
    gpus: SharedGPUs | None = None
    """The GPUs that a colocated trainer shares with a generator."""
    policy: str | None = None
    """The name of an adapter that exists; None is the model itself."""
    _flops: ModelFlops | None = field(default=None, init=False)
    """By which batches are balanced over several ranks."""
    _dropped: bool = field(default=False, init=False)
    _push_bytes_per_s: float | None = field(default=None, init=False)
    _collecting: asyncio.Task[None] | None = field(default=None, init=False)
    """What the ranks write in the background."""

    def __post_init__(self) -> None:
        """Has the mesh tell a rank's own error from those that it caused. A colocated policy has its memory now."""
        self.mesh.is_consequence = _is_consequence
        if self.config.num_data_parallel_ranks > 1:
            self._flops = ModelFlops.of(self.config.model, self.config.head, frozen=self.config.is_frozen)
        if self.gpus is not None:
            self.gpus.join("train", self)

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
        pushes_to: Callable[[], Sequence[Mesh]] = tuple,
        store_name: str | None = None,
        shared_gpus: SharedGPUs | None = None,
    ) -> "TrainerHandle":
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

    async def stop(self) -> None:
        """Ends the trainer's processes. May be called again."""
        self._stop_collecting()
        await self.mesh.stop()

    async def policy_version(self) -> int:
        """The number of optimizer steps applied so far."""
        return (await self._call("policy_version", needs_memory=False))[0]

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, object] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss, summed over all tokens of the batch, to the accumulated gradient.

        Raises ValueError for an invalid loss or batch, and any exception that a custom loss raises. The accumulated
        gradient is then as it was before the call.
        """
        checked = get_loss(loss, loss_config)
        checked.check_head(self.config.head)
        return await self._compute("forward_backward", batch, checked, loss=checked)

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Computes log-probs of the batch's target tokens, and entropies if asked to, or a critic's values.

        Raises ValueError for an invalid batch, and if a critic is asked for entropies.
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

        A colocated trainer has its parameters and gradients on the GPU again in its next phase. Raises ValueError if
        nothing is chosen, and for another device.
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
        if not self.pushes:
            raise ValueError(
                f"push_model_state_dict: {self.mesh.name!r} was started without a generator that could pull; give "
                "`generator=` when starting it"
            )
        if self.policy is None and self.config.is_frozen:
            raise ValueError(
                "push_model_state_dict: the base is frozen, so generators have it from its directory; push an adapter"
            )
        start = time.perf_counter()
        record = (await self._call("push_model_state_dict", needs=self.pushes_to))[0]
        assert record is not None
        self._push_bytes_per_s = sum(spec.nbytes for spec in record.manifest) / (time.perf_counter() - start)
        self.version_records.add(record)
        return record.version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes model, optimizer, random state and version.

        Hosts that do not share its folder write beside `path` on their own disk, and the controller collects the files.

        Raises ValueError if `path` exists and is not a checkpoint of ours or cannot be written, and for a `keep_last`
        below 1; and OSError, which names `path`, if there is too little room or the disk fails.
        """
        self._check_not_dropped()
        if self._collecting is not None:
            await self.wait_for_checkpoint()
        there = await self.files.to_write(path)
        await self._call("save_checkpoint", there, asynchronous, keep_last, varies=True)
        if there != Path(path).absolute():
            self._collecting = asyncio.create_task(self.files.collect(path, keep_last))
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

        Raises ValueError if `path` is missing, damaged, not a checkpoint of ours, or one of another model.
        """
        self._check_not_dropped()
        async with self.files.to_read(path) as paths:
            arguments = [(self.policy, there, weights_only) for there in paths]
            return (await self.mesh.call("load_checkpoint", arguments, varies=True))[0]

    async def export_hf(self, path: Path) -> None:
        """Writes a model directory with weights in the generator's dtype, or without one in `compute_dtype`.

        Raises ValueError and OSError as `save_checkpoint`.
        """
        there = await self.files.to_write(path)
        await self._call("export_hf", there, varies=True)
        await self.files.collect(path)

    async def adapter(self, name: str, config: LoRAConfig) -> "Trainer":
        """Makes a LoRA adapter over this trainer's frozen base, and returns its handle.

        Raises ValueError if the trainer was started without `TrainerConfig.lora`, for a name that is taken or not
        allowed, a rank above the generator's, modules that the model lacks, and too little memory. Everything else is
        then as it was.
        """
        check_adapter_name(name)
        if self.config.lora is None:
            raise ValueError(
                f"adapter: {self.mesh.name!r} trains all of its parameters; start it with `TrainerConfig.lora` set, "
                "which freezes them"
            )
        if self.max_lora_rank is not None and config.rank > self.max_lora_rank:
            raise ValueError(
                f"adapter {name!r}: rank is {config.rank}; the generator serves ranks up to {self.max_lora_rank} "
                "(GeneratorConfig.lora.max_rank)"
            )
        await self.mesh.call("adapter", [(name, config)] * self.mesh.num_ranks, varies=True)
        return replace(self, policy=name)

    async def drop(self) -> None:
        """Frees an adapter. Later calls are refused. Raises ValueError if this is not an adapter."""
        policy = self._adapter_name("drop")
        self._check_not_dropped()
        self._dropped = True
        await self.mesh.call("drop", [(policy,)] * self.mesh.num_ranks, varies=True)
        self.version_records.forget(policy)
        if self.gpus is not None:
            self.gpus.leave(self)

    async def export_peft(self, path: Path) -> None:
        """Writes an adapter as a directory that `peft` and vLLM can load.

        Raises ValueError if this is not an adapter, and as `save_checkpoint`.
        """
        self._adapter_name("export_peft")
        there = await self.files.to_write(path)
        await self._call("export_peft", there, varies=True)
        await self.files.collect(path)

    async def take_memory(self) -> None:
        """Moves parameters and gradients to the GPUs. The optimizer state stays on the host, and is used in pieces."""
        await self._move("cuda", optimizer=False)

    async def free_memory(self) -> None:
        """Moves everything to the host."""
        await self._move("cpu", optimizer=True)

    async def _move(self, device: str, *, optimizer: bool) -> None:
        arguments = [(self.policy, device, True, True, optimizer)] * self.mesh.num_ranks
        await self.mesh.call("to", arguments, needs_memory=False)

    async def _compute(
        self, verb: str, batch: Sequence[Datum], option: object, *, loss: Loss | None = None
    ) -> ForwardBackwardOutput:
        """Sends each data-parallel rank its local batch and `option`. A thread checks, plans and pickles the batch."""
        self._check_not_dropped()
        batch, plans = checked_data(batch), list[BatchPlan]()

        def arguments() -> list[tuple[object, ...]]:
            ready = self._ready(batch, loss)
            plans.append(
                plan_batch(
                    ready,
                    num_ranks=self.config.num_data_parallel_ranks,
                    max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
                    share_prefixes=self.share_prefixes,
                    flops=self._flops,
                )
            )
            local_batches = plans[0].split([plain_datum(datum) for datum in ready])
            return [(self.policy, local_batches[index], option) for index in self._data_parallel_ranks()]

        outputs = await self.mesh.call(verb, arguments, size=lambda: sum(len(datum.tokens) for datum in batch))
        return self._merged(plans[0], outputs)

    def _ready(self, batch: Sequence[Datum], loss: Loss | None) -> Sequence[Datum]:
        """The batch with what the loss derives from the whole of it. Raises ValueError if it cannot be computed."""
        is_policy = self.config.head == "lm" and (self.policy is not None or not self.config.is_frozen)
        if not is_policy and any(datum.routes is not None for datum in batch):
            batch = [replace(datum, routes=None) for datum in batch]  # they are another model's
        validate_batch(
            batch,
            required_inputs=() if loss is None else loss.required_inputs,
            vocab_size=self.limits.vocab_size,
            max_seq_len=self.limits.max_seq_len,
            experts=self.limits.experts,
            reads_images=self.limits.reads_images,
        )
        if batch[0].routes is not None:
            self.config.check_routes()
        return batch if loss is None else loss.prepared(batch)

    def _data_parallel_ranks(self) -> list[int]:
        """The index of every rank's local batch. Ranks of one data-parallel group (TP, PP, CP) get the same one."""
        return [self.config.data_parallel_rank(rank) for rank in range(self.mesh.num_ranks)]

    def _merged(self, plan: BatchPlan, outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        """The ranks' outputs as one, in the order of the batch."""
        # Ranks of one data-parallel group return the same output: that of the first one counts, or metrics would be
        # summed several times.
        owners = self._data_parallel_ranks()
        parts = [outputs[owners.index(local_batch)] for local_batch in range(self.config.num_data_parallel_ranks)]
        entropies = [part.entropy for part in parts if part.entropy is not None]
        values = [part.values for part in parts if part.values is not None]
        metrics = merge_metrics([part.metrics for part in parts])
        if "model_flops" in metrics:
            metrics["peak_flops"] = metrics["seconds_engine_max"] * self.matrix_rate * self.mesh.num_ranks
        return ForwardBackwardOutput(
            logprobs=() if values else plan.restore([part.logprobs for part in parts]),
            values=plan.restore(values) if values else None,
            entropy=plan.restore(entropies) if entropies else None,
            metrics=metrics,
        )

    async def _call(self, verb: str, *args: object, **options: Any) -> list[Any]:
        """The answers of all ranks to a call about this policy, with the same arguments. See `Mesh.call`.

        Raises ValueError if the policy was dropped.
        """
        self._check_not_dropped()
        return await self.mesh.call(verb, [(self.policy, *args)] * self.mesh.num_ranks, **options)

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


async def _traits(mesh: Mesh) -> tuple[bool, float]:
    """Waits until every rank is ready. Whether all of them share prefixes, and the rate of the first one's device.

    A mesh that fails is stopped.
    """
    try:
        shares = await mesh.call("start", [()] * mesh.num_ranks, varies=True, needs_memory=False)
        (rate,) = await mesh.call("matrix_rate", [()], needs_memory=False)
    except BaseException:
        await mesh.stop()
        raise
    return all(shares), rate


def _is_consequence(error: BaseException) -> bool:
    from trainer.engines.base import RankFailureError  # loads torch

    return isinstance(error, RankFailureError)
