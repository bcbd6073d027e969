"""One training client: an adapter, and Tinker's verbs on it.

Every method runs in its turn (see `turns`), so nothing of the same adapter runs beside it. A user's mistake is a
`ValueError`; the adapter is then as it was before the call.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from ownloop_server.answers import ResponseBody, Turns
from ownloop_server.archive import EXPORTED, Archive, CheckpointPath
from ownloop_server.database import TrainingRunRow
from ownloop_server.sampling_clients import SamplingClients
from ownloop_server.served_models import ServedModel, WholeTraining
from ownloop_server.wire import TrainingBatch, encode_output, read_batch
from rl.lora import Policy
from rl.losses import Loss, LossInputs
from rl.protocols import Trainer
from rl.types import AdamParams, ForwardBackwardOutput, MuonParams

_OURS = ("memory_", "seconds_", "model_flops", "peak_flops")
"""Metrics of the trainer that say nothing about a client's batch."""


class TrainingClient:
    """An adapter that a client trains."""

    def __init__(self, run: TrainingRunRow, model: ServedModel, archive: Archive) -> None:
        """The adapter is made by `create` or `create_from`, which must be its first call."""
        self.run = run
        self.model = model
        self.turns = Turns(run.id)
        self._archive = archive
        self._trainer: Trainer | None = None
        self._whole: WholeTraining | None = None
        self._saved_now: set[str] = set()  # the paths that hold what is trained now
        self._num_adapters = 0
        self.num_steps = 0
        """Optimizer steps that this client made."""
        self.num_tokens = 0
        """Tokens of its batches."""

    @property
    def _adapter_name(self) -> str:
        """A new one after every load: versions of an adapter count from 0 again, and the old ones may still be kept."""
        return f"{self.run.id.replace(':', '-')}.{self._num_adapters}"

    @property
    def _current(self) -> Trainer:
        if self._trainer is None:
            raise ValueError(f"{self.run.id} could not be made, or has ended; create another training client")
        return self._trainer

    async def create(self) -> ResponseBody:
        """Makes a new adapter, or begins to train all weights."""
        if self.run.rank == 0:
            await self._begin_whole()
        else:
            self._trainer = await self.model.adapter(self._adapter_name, self.run.lora)
        return ResponseBody.json({"type": "create_model", "model_id": self.run.id})

    async def load(self, path: str, *, optimizer: bool) -> ResponseBody:
        """Puts a checkpoint in the adapter's place. The accumulated gradient is dropped."""
        _, folder = self._archive.find_ours(path)
        if optimizer and CheckpointPath.parse(path).kind != "weights":
            raise ValueError(f"{path} was saved for sampling and has no optimizer state; use a path of save_state")
        self._num_adapters += 1  # another name, as `_adapter_name` explains
        self._saved_now.clear()  # what comes now was not saved
        if self.run.rank == 0:
            trainer = await self._begin_whole() if self._trainer is None else self._trainer
            await trainer.load_checkpoint(folder, weights_only=not optimizer)
            return ResponseBody.json({"type": "load_weights", "path": path, "model_id": self.run.id})
        loaded = await self.model.adapter(self._adapter_name, self.run.lora)
        try:
            await loaded.load_checkpoint(folder, weights_only=not optimizer)
        except BaseException:
            await loaded.drop()
            raise
        replaced, self._trainer = self._trainer, loaded
        if replaced is not None:
            await replaced.drop()  # after the new one counts: a failure here loses nothing
        return ResponseBody.json({"type": "load_weights", "path": path, "model_id": self.run.id})

    async def _begin_whole(self) -> Trainer:
        if self.model.whole is None:
            raise ValueError("this server has no room for full fine-tuning, which `ownloop serve --full 1` makes")
        self._whole = await self.model.whole()
        self._trainer, self.model = self._whole.trainer, self._whole.served
        return self._trainer

    async def forward_backward(
        self, request: messages.ForwardBackwardRequest, own_losses: Mapping[str, Loss]
    ) -> ResponseBody:
        """Adds the gradient of a loss, summed over all tokens; only computes it if the request is `forward_only`.

        `own_losses` are the losses that the client's session has made, by id.
        """
        batch = await asyncio.to_thread(read_batch, request, own_losses, self.model.read_image)
        if batch.forward_only:
            output = await self._current.forward(batch.data, entropy=batch.loss.needs_entropy)
            metrics = await asyncio.to_thread(_evaluate, batch, output)
        else:
            loss = batch.loss if batch.loss.name == "custom" else batch.loss.name
            output = await self._current.forward_backward(batch.data, loss, _options(batch))
            metrics = output.metrics
            num_tokens = sum(len(datum.tokens) for datum in batch.data)
            self.num_tokens += num_tokens
            self.model.throughput.add("trained", num_tokens)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OURS)}
        return ResponseBody.protobuf(await asyncio.to_thread(encode_output, batch, output.logprobs, metrics))

    async def optim_step(self, params: types.OptimParams) -> ResponseBody:
        """One step with the accumulated gradient: AdamW's, or Muon's under Tinker's name, Dimuon."""
        if isinstance(params, types.AdamParams):
            step = AdamParams(**params.model_dump())  # fields have the same names on purpose
        elif params.type == "dimuon":
            dimuon = types.DimuonParams(**params.model_dump())
            clip = max(dimuon.grad_clip_norm, 0.0)  # in Tinker, a negative one switches clipping off
            step = MuonParams(learning_rate=dimuon.learning_rate, beta1=dimuon.beta1, grad_clip_norm=clip)
        else:
            raise ValueError(f"the optimizer is {params.type!r}; pass AdamParams or DimuonParams")
        output = await self._current.optim_step(step)
        self.num_steps += 1
        self._saved_now.clear()
        metrics = {"policy_version": float(output.policy_version), "skipped": float(output.skipped)}
        if math.isfinite(output.grad_norm):  # JSON has no infinity; a skipped step has such a norm
            metrics["grad_norm"] = output.grad_norm
        return ResponseBody.json({"type": "optim_step", "metrics": metrics})

    async def save(
        self, kind: str, request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest
    ) -> ResponseBody:
        """Writes a checkpoint under the name that the client chose."""
        if request.path is None:
            raise ValueError("path is missing; save_state needs a name")
        path = CheckpointPath(run_id=self.run.id, kind=kind, name=request.path)
        await self._archive.save(
            path,
            self._current.save_checkpoint,
            ttl_seconds=request.ttl_seconds,
            # a name for sampling always means the same weights
            overwrite=isinstance(request, types.SaveWeightsRequest) and request.overwrite,
            user_metadata=request.user_metadata,
        )
        self._saved_now.add(str(path))
        return ResponseBody.json({"type": request.type, "path": str(path)})

    async def export(self, request: types.SaveWeightsExternalRequest) -> ResponseBody:
        """Writes the adapter as `peft` loads it, or all weights as `transformers` does."""
        if request.age_encryption_recipients:
            raise ValueError(
                "age_encryption_recipients is not supported; leave it out, and have `ownloop serve` use https"
            )
        path = CheckpointPath(run_id=self.run.id, kind=EXPORTED, name=request.path)
        write = self._current.export_hf if self.run.rank == 0 else self._current.export_peft
        await self._archive.save(path, write, ttl_seconds=request.ttl_seconds, overwrite=False, user_metadata=None)
        return ResponseBody.json({"type": request.type, "path": str(path)})

    async def sampling_client(
        self, request: types.SaveWeightsForSamplerRequest, session_id: str, samplers: SamplingClients
    ) -> ResponseBody:
        """Makes a sampling client of the current weights: frozen, or following ("inflight")."""
        if request.sampling_session_seq_id is None:
            raise ValueError("sampling_session_seq_id is missing; without a path it is needed")
        snapshots = self.model.snapshots
        follows = self.run.id if request.kind == "inflight" else ""
        policy = await (snapshots.follow if follows else snapshots.freeze)(self._adapter_name, self._current)
        number, base_model = request.sampling_session_seq_id, self.run.base_model
        sampler = samplers.add(session_id, number, self.model, base_model, policy, follows=follows)
        return ResponseBody.json({"type": request.type, "sampling_session_id": sampler.id})

    async def freeze(self) -> Policy:
        """Keeps the current version for sampling, between two calls."""
        # not while a step changes the weights
        return await self.turns.between(lambda: self.model.snapshots.freeze(self._adapter_name, self._current))

    async def freeze_saved(self, path: str) -> Policy:
        """Keeps what was saved under a path. Raises ValueError if that is no longer the current version."""

        async def freeze() -> Policy:
            if path not in self._saved_now:  # asked again in its turn: a step may have come between
                raise ValueError(unloaded_whole(path))
            return await self.model.snapshots.freeze(self._adapter_name, self._current)

        return await self.turns.between(freeze)

    async def close(self) -> None:
        """Gives the adapter up. Its checkpoints, and frozen versions that are kept, stay."""
        await self.turns.close()
        trainer, self._trainer = self._trainer, None
        if self._whole is not None:
            await self._whole.end()  # ends its processes, and the trainer with them
        elif trainer is not None:
            await trainer.drop()

    def describe(self) -> types.GetInfoResponse:
        """What `get_info` answers."""
        data = types.ModelData(arch=None, model_name=self.model.name_for_clients, tokenizer_id=self.model.tokenizer)
        return types.GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=self.run.id,
            is_lora=self.run.rank > 0,
            lora_rank=self.run.rank or None,
            model_name=self.run.base_model,
        )


def unloaded_whole(path: str) -> str:
    """Why all weights of a checkpoint cannot be sampled from."""
    return (
        f"{path} holds all weights of a model, which only the client that saved them can sample from, until its next "
        "optim_step; make a training client of the path, and then save_weights_and_get_sampling_client"
    )


def _options(batch: TrainingBatch) -> Mapping[str, object]:
    """The loss's options, as `Trainer.forward_backward` takes them."""
    shared = {name: getattr(batch.loss.shared, name) for name in batch.loss.takes}
    return {**batch.loss.options, **shared}


def _evaluate(batch: TrainingBatch, output: ForwardBackwardOutput) -> Mapping[str, float]:
    """The loss of a forward pass, by the same function as in training."""

    def joined(arrays: list[np.ndarray[Any, Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    lengths = [len(datum.tokens) for datum in batch.data]
    inputs = LossInputs(
        arrays={name: joined([d.loss_inputs[name] for d in batch.data]) for name in batch.data[0].loss_inputs},
        datum_index=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        num_datums=len(lengths),
    )
    entropy = None if output.entropy is None else joined(list(output.entropy))
    loss, metrics = batch.loss(joined(list(output.logprobs)), entropy, inputs)
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}
