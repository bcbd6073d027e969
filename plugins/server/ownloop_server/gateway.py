"""The state behind the routes: sessions, training clients, sampling clients and requests.

A checkpoint that clients sample from is loaded once, for all sampling clients and requests that name the same path.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import HTTPException
from pydantic import BaseModel
from tinker import types

from ownloop_server.answers import Answers, PendingAnswer, ResponseBody, digest_of, errors_logged
from ownloop_server.archive import Archive, CheckpointPath
from ownloop_server.database import DATABASE, Database, TrainingRunRow, now, texts
from ownloop_server.sampling_clients import Sampler, SamplingClients
from ownloop_server.served_models import ServedModel, ServedModels
from ownloop_server.training_client import TrainingClient, unloaded_whole
from ownloop_server.wire import traced_loss
from rl.checks import MAX_SEED, check_between
from rl.lora import Policy
from rl.losses import Loss

MAX_LOSSES = 100
SESSION_S = 1800.0
"""A session that has sent no heartbeat for so long has ended. Clients send one every 10 s."""
_SWEEP_S = 30.0
_Made: TypeAlias = tuple[TrainingRunRow, Callable[[TrainingClient], Awaitable[ResponseBody]]]
"""A new client's row, and its first call."""


@dataclass(kw_only=True)
class ClientSession:
    """A `ServiceClient` of some process."""

    id: str
    user: str
    """Whose key opened it; empty on a server without keys."""
    user_metadata: dict[str, str] | None
    display_name: str | None
    last_seen: float
    """A time of the event loop's clock."""
    losses: dict[str, Loss] = field(default_factory=dict[str, Loss])
    """The client's own, by id."""


class Gateway:
    """What the server knows. Lives on one event loop."""

    def __init__(
        self, models: Iterable[ServedModel], folder: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`folder` is the server's, for its database and checkpoints. `say` prints who trains what.

        Raises ValueError if two models have a name in common.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.models = ServedModels(models)
        self._say = say
        self.database = Database(folder / DATABASE)
        self.archive = Archive(folder, self.database)
        self.answers = Answers()
        self.samplers = SamplingClients()
        self.started = time.monotonic()
        self.sessions: dict[str, ClientSession] = {}
        self.training: dict[str, TrainingClient] = {}
        self._from_paths: dict[tuple[str, str], asyncio.Task[Sampler]] = {}
        self._loaded = LoadedCheckpoints(self.models, self.archive, self.database, self.training)

    # Sessions

    def open_session(self, request: types.CreateSessionRequest, user: str = "") -> ClientSession:
        """A new session of a user. Raises ValueError for a name or metadata that no answer could hold."""
        texts("display_name", {"": request.display_name})
        session = ClientSession(
            id=uuid.uuid4().hex[:16],
            user=user,
            user_metadata=texts("user_metadata", request.user_metadata),
            display_name=request.display_name,
            last_seen=asyncio.get_running_loop().time(),
        )
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> ClientSession:
        """A session that has not ended. Raises HTTPException 410, at which the client stops, for any other."""
        session = self.sessions.get(session_id)
        if session is None:
            raise HTTPException(410, f"session {session_id} has ended, or is not of this server; make a ServiceClient")
        session.last_seen = asyncio.get_running_loop().time()  # any request keeps a session, not the heartbeat alone
        return session

    def owner(self, named: str) -> str | None:
        """The user of what an id or a `tinker://` path names; None if nothing is known of it."""
        if (pending := self.answers.find(named)) is not None:
            named = pending.owner
        session_id = named.removeprefix("tinker://").partition("/")[0].partition(":")[0]
        session = self.sessions.get(session_id)
        return self.database.owner(session_id) if session is None else session.user

    async def end_session(self, session_id: str) -> None:
        """Gives up the session's adapters and sampling clients, and cancels what they sample."""
        if self.sessions.pop(session_id, None) is None:
            return
        await self.samplers.cancel_session(session_id)  # before the adapters: sampling still reads them
        for run_id in [run_id for run_id in self.training if run_id.startswith(f"{session_id}:train:")]:
            with errors_logged():
                await self.training.pop(run_id).close()
            self._say(f"{run_id} ended")
        for model, policy in self.samplers.forget_session(session_id):
            with errors_logged():
                await model.snapshots.drop(policy)
        self.answers.forget_owner(session_id)

    async def sweep(self) -> None:
        """Ends silent sessions, forgets fetched results and deletes expired checkpoints, again and again."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            limit = asyncio.get_running_loop().time() - SESSION_S
            for session in [session for session in self.sessions.values() if session.last_seen < limit]:
                await self.end_session(session.id)
            with errors_logged():
                self.answers.sweep()
                await asyncio.to_thread(self.archive.delete_expired)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Removes sessions that ended while the block runs, and all sessions at its end."""
        sweeper = asyncio.create_task(self.sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.wait([sweeper])
            await self.close()

    async def close(self) -> None:
        """Ends everything."""
        for session_id in list(self.sessions):
            await self.end_session(session_id)
        self.database.close()

    # Training

    def create(self, request: types.CreateModelRequest) -> PendingAnswer:
        """Makes a training client of a new adapter."""
        session = self.session(request.session_id)

        def made() -> _Made:
            config = request.lora_config or types.LoraConfig(rank=32)
            self._check_new(request.base_model, config.rank, request.optimizer_config.type)
            check_between(-MAX_SEED, MAX_SEED, seed=config.seed or 0)
            row = TrainingRunRow(
                id=f"{session.id}:train:{request.model_seq_id}",
                user=session.user,
                base_model=request.base_model,
                directory=self.models.find(request.base_model).tokenizer,
                rank=config.rank,
                # drawn here and kept, so that a restored adapter begins equal
                seed=secrets.randbelow(2**31) if config.seed is None else config.seed,
                train_attn=config.train_attn,
                train_mlp=config.train_mlp,
                train_unembed=config.train_unembed,
                user_metadata=texts("user_metadata", request.user_metadata),
                last_request_at=now(),
            )
            return row, lambda client: client.create()

        return self._begin(session, request.model_seq_id, request, made)

    def create_loss(self, request: types.CreateCustomLossRequest) -> PendingAnswer:
        """Keeps a loss that the client sends as a graph, for the time of its session."""
        session, number = self.session(request.session_id), request.custom_loss_seq_id
        # repeated by the SDK if its answer is lost
        pending, new = self.answers.open((f"{session.id}:loss", number), session.id, digest_of(request))
        if new:
            try:
                # each holds a graph; a loop that makes one at each step would fill the memory
                if len(session.losses) >= MAX_LOSSES:
                    raise ValueError(f"the session has {MAX_LOSSES} losses, the most that this server keeps for one")
                session.losses[f"{session.id}:loss:{number}"] = traced_loss(request)
                response = types.CreateCustomLossResponse(loss_id=f"{session.id}:loss:{number}")
                pending.set(ResponseBody.json(response.model_dump()))
            except ValueError as error:
                pending.set(ResponseBody.failure(error))
        return pending

    def create_from(self, request: types.LoadWeightsRequest) -> PendingAnswer:
        """Makes a training client of a checkpoint's adapter."""
        assert request.session_id is not None, "the caller has looked"
        assert request.model_seq_id is not None, "the caller has looked"
        session, number = self.session(request.session_id), request.model_seq_id

        def made() -> _Made:
            source = self.database.run(CheckpointPath.parse(request.path).run_id)
            if source is None:
                raise ValueError(f"there is no training run of {request.path}")
            base_model = request.base_model or source.base_model
            optimizer = request.optimizer_config
            self._check_new(base_model, source.rank, "adamw" if optimizer is None else optimizer.type)
            row = TrainingRunRow(
                id=f"{session.id}:train:{number}",
                user=session.user,
                base_model=base_model,
                directory=self.models.find(base_model).tokenizer,
                rank=source.rank,
                seed=source.seed,
                train_attn=source.train_attn,
                train_mlp=source.train_mlp,
                train_unembed=source.train_unembed,
                user_metadata=texts("user_metadata", request.user_metadata),
                last_request_at=now(),
            )
            return row, lambda client: client.load(request.path, optimizer=request.optimizer)

        return self._begin(session, number, request, made)

    def training_client(self, run_id: str) -> TrainingClient:
        """Raises HTTPException 404 if there is none with this id."""
        client = self.training.get(run_id)
        if client is None:
            saved = "; its checkpoints can be loaded into a new one" if self.database.run(run_id) else ""
            raise HTTPException(404, f"training client {run_id} has ended, or never was{saved}")
        self.session(run_id.partition(":")[0])
        return client

    def submit(self, request: Any, call: Callable[[TrainingClient], Awaitable[ResponseBody]]) -> PendingAnswer:
        """Has the training client of a request, `model_id`, run a call in its turn, `seq_id`."""
        run_id, number = request.model_id, request.seq_id
        client = self.training_client(run_id)
        if number is None or number < 0:
            raise HTTPException(422, f"seq_id is {number}; a call of a training client needs its sequence number")
        pending, new = self.answers.open((run_id, number), run_id.partition(":")[0], digest_of(request))
        if new:
            client.turns.put(number, lambda: call(client), pending)
            self.database.touch(client.run)
        return pending

    def _begin(
        self, session: ClientSession, number: int, request: BaseModel, made: Callable[[], _Made]
    ) -> PendingAnswer:
        """Adds a training client, whose first call, number 0, makes its adapter."""
        pending, new = self.answers.open((f"{session.id}:train:{number}", 0), session.id, digest_of(request))
        if new:
            try:
                check_between(0, 10**9 - 1, model_seq_id=number)  # a part of paths
                row, first = made()
                self.database.save(row)  # before the client can save: a checkpoint's run must be known
            except ValueError as error:
                pending.set(ResponseBody.failure(error))
                return pending
            except Exception:  # the client hears of it and sends the request again
                self.answers.take_back(pending)
                raise
            what = f"an adapter of rank {row.rank}" if row.rank else "all weights"
            whose = f" of {row.user}" if row.user else ""
            named = f" ({session.display_name})" if session.display_name else ""
            self._say(f"{row.id}{whose}{named} trains {what} of {row.base_model}")
            client = TrainingClient(row, self.models.find(row.base_model), self.archive)
            self.training[row.id] = client
            client.turns.put(0, lambda: first(client), pending)
        return pending

    def _check_new(self, base_model: str, rank: int, optimizer: str) -> None:
        """Raises ValueError for an adapter that cannot be trained here."""
        model = self.models.find(base_model)
        if rank == 0 and model.whole is None:
            raise ValueError(
                "rank is 0, which asks for full fine-tuning; this server was started without room for it, which "
                f"`ownloop serve --full 1` makes: choose a rank from 1 to {model.max_rank}"
            )
        if not 0 <= rank <= model.max_rank:
            raise ValueError(
                f"rank is {rank}; it must be from 1 to {model.max_rank}, which `ownloop serve --max-rank` sets"
            )
        if optimizer not in ("adamw", "dimuon"):
            raise ValueError(f"the optimizer is {optimizer!r}; it must be adamw or dimuon")

    # Sampling

    async def create_sampler(self, request: types.CreateSamplingSessionRequest) -> Sampler:
        """Makes a sampling client of the base model or of a checkpoint. Raises ValueError for others."""
        session = self.session(request.session_id)
        sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
        # the SDK repeats a request; the same client is the answer
        if (known := self.samplers.find(sampler_id)) is not None:
            if (known.path or known.base_model) != (request.model_path or request.base_model):
                raise ValueError(f"there is a sampling client {sampler_id} of {known.path or known.base_model}")
            return known
        if request.model_path is None:
            name, number = request.base_model or "", request.sampling_session_seq_id
            return self.samplers.add(session.id, number, self.models.find(name), name, None)
        loaded = sampler_id, request.model_path
        if loaded not in self._from_paths:  # loading takes seconds, in which the SDK may repeat it
            loading = self._load_sampler(session.id, request.sampling_session_seq_id, request.model_path)
            self._from_paths[loaded] = asyncio.create_task(loading)
        try:
            # a client that leaves must not stop the load of another one
            return await asyncio.shield(self._from_paths[loaded])
        finally:
            self._from_paths.pop(loaded, None)

    async def _load_sampler(self, session_id: str, number: int, path: str) -> Sampler:
        model, name, policy = await self._loaded.load(path)
        return self.samplers.add(session_id, number, model, name, policy, path)

    async def find_policy(self, name: str) -> tuple[ServedModel, Policy]:
        """What a base model, a training client (as it is now), a sampling client or a path samples from."""
        if name.startswith("tinker://"):
            return (loaded := await self._loaded.load(name))[0], loaded[2]  # a path, before names: it cannot be both
        if (sampler := self.samplers.find(name)) is not None:
            return sampler.model, sampler.policy
        if name in self.training:
            client = self.training_client(name)
            return client.model, await client.freeze()
        return self.models.find(name), None

    def sample(self, request: types.SampleRequest) -> PendingAnswer:
        """Begins to sample."""
        sampler = self.samplers.find(request.sampling_session_id or "")
        if sampler is None:
            raise HTTPException(404, self.samplers.missing(request.sampling_session_id))
        session = self.session(sampler.id.partition(":")[0])
        # without a number the SDK does not repeat it
        key: Hashable = (sampler.id, request.seq_id) if request.seq_id is not None else uuid.uuid4()
        pending, new = self.answers.open(key, session.id, digest_of(request))
        if new:
            self.samplers.begin(sampler, request, pending)
        return pending


class LoadedCheckpoints:
    """Which checkpoint a generator has under which policy."""

    def __init__(
        self, models: ServedModels, archive: Archive, database: Database, training: Mapping[str, TrainingClient]
    ) -> None:
        """None at first. `training` are the training clients by their run ids."""
        self._models = models
        self._archive = archive
        self._database = database
        self._training = training
        self._policies: dict[str, tuple[datetime, Policy]] = {}
        self._loading = asyncio.Lock()
        self._num_loaded = 0

    async def load(self, path: str) -> tuple[ServedModel, str, Policy]:
        """The model, the name by which its client asked for it, and the policy. Raises ValueError without the path."""
        row, folder = self._archive.find_ours(path)
        run = self._database.run(row.run_id)
        assert run is not None, "a checkpoint's run is in the database before the checkpoint"
        if run.rank == 0:
            if (client := self._training.get(run.id)) is None:
                raise ValueError(unloaded_whole(path))
            policy = await client.freeze_saved(path)
            return client.model, run.base_model, policy
        async with self._loading:  # one at a time: each takes an adapter's place in the trainer
            model = self._models.find(run.base_model)
            saved_at, known = self._policies.get(path, (None, None))
            if known is not None and saved_at == row.created_at and known in model.snapshots:
                return model, run.base_model, known
            self._num_loaded += 1
            name = f"loaded.{self._num_loaded}"
            # The checkpoint goes to the generator by way of an adapter of the trainer, which reads its format.
            trainer = await model.adapter(name, run.lora)
            try:
                await trainer.load_checkpoint(folder, weights_only=True)
                policy = await model.snapshots.freeze(name, trainer)
            finally:
                await trainer.drop()
            self._policies[path] = row.created_at, policy
            kept = {
                path: of_path
                for path, of_path in self._policies.items()
                if any(of_path[1] in m.snapshots for m in self._models)
            }
            self._policies = kept
            return model, run.base_model, policy
