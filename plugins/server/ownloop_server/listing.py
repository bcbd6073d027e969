"""Routes that list and manage what the server has: models, training runs, checkpoints, sampling clients.

`tinker checkpoint download` fetches files without a key. So the addresses of an exported checkpoint's files are signed:
the server gives them to the checkpoint's user, and they work for an hour, or until the server ends.
"""

import hmac
import secrets
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel
from tinker import types

from ownloop_server.access import DOWNLOADS, Caller, Door
from ownloop_server.archive import EXPORTED, KINDS, CheckpointPath
from ownloop_server.database import CheckpointRow, TrainingRunRow
from ownloop_server.gateway import Gateway
from ownloop_server.keys import User

listing = APIRouter()
Count = Annotated[int, Query(ge=0)]
"""A negative one would count from the end of a list."""


class TinkerPath(BaseModel):
    """The body of `weights_info`."""

    tinker_path: str


class TimeToLive(BaseModel):
    """The body of a change of a checkpoint's time to live."""

    ttl_seconds: int | None = None


@listing.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


@listing.get("/get_server_capabilities")
async def get_server_capabilities(door: Door) -> types.GetServerCapabilitiesResponse:
    """The models."""
    return types.GetServerCapabilitiesResponse(
        supported_models=[
            types.SupportedModel(model_name=name, max_context_length=model.max_context, trainable=True, sampleable=True)
            for model in door.models
            for name in model.names
        ]
    )


@listing.get("/training_runs")
async def training_runs(door: Door, user: Caller, limit: Count = 20, offset: Count = 0) -> types.TrainingRunsResponse:
    """The user's training runs, the one with the newest request first."""
    rows = door.database.runs(_seen_by(user))
    page = rows[offset : offset + limit]
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
    return types.TrainingRunsResponse(training_runs=[_run(door, row) for row in page], cursor=cursor)


@listing.get("/training_runs/{run_id}")
async def training_run(run_id: str, door: Door) -> types.TrainingRun:
    """One training run."""
    return _run(door, _found(door, run_id))


@listing.get("/training_runs/{run_id}/checkpoints")
async def run_checkpoints(run_id: str, door: Door) -> types.CheckpointsListResponse:
    """The checkpoints of a run."""
    _found(door, run_id)
    return types.CheckpointsListResponse(checkpoints=[_checkpoint(row) for row in door.database.checkpoints(run_id)])


@listing.get("/checkpoints")
async def checkpoints(door: Door, user: Caller, limit: Count = 100, offset: Count = 0) -> types.CheckpointsListResponse:
    """The checkpoints of all runs of the user."""
    rows = door.database.checkpoints(user=_seen_by(user))
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(rows))
    page = [_checkpoint(row) for row in rows[offset : offset + limit]]
    return types.CheckpointsListResponse(checkpoints=page, cursor=cursor)


@listing.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run_id: str, kind: str, name: str, door: Door) -> Response:
    """Deletes a checkpoint."""
    door.archive.delete(_path(door, run_id, kind, name))
    return Response(status_code=204)


@listing.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
async def set_checkpoint_ttl(run_id: str, kind: str, name: str, body: TimeToLive, door: Door) -> Response:
    """Changes when a checkpoint expires."""
    door.archive.set_ttl(_path(door, run_id, kind, name), body.ttl_seconds)
    return Response(status_code=204)


@listing.post("/weights_info")
async def weights_info(body: TinkerPath, door: Door) -> types.WeightsInfoResponse:
    """What a checkpoint is of."""
    path = CheckpointPath.parse(body.tinker_path)
    row = _found(door, path.run_id)
    _path(door, path.run_id, path.kind, path.name)
    return types.WeightsInfoResponse(
        base_model=row.base_model,
        is_lora=row.rank > 0,
        lora_rank=row.rank or None,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )


@listing.get("/samplers/{sampler_id}")
async def sampler(sampler_id: str, door: Door) -> types.GetSamplerResponse:
    """What a sampling client samples from."""
    found = door.samplers.find(sampler_id)
    if found is None:
        raise HTTPException(404, door.samplers.missing(sampler_id))
    return types.GetSamplerResponse(sampler_id=found.id, base_model=found.model.name_for_clients, model_path=found.path)


@listing.get("/sessions/{session_id}")
async def session(session_id: str, door: Door) -> types.GetSessionResponse:
    """What a session has made."""
    found = door.session(session_id)
    return types.GetSessionResponse(
        training_run_ids=[run_id for run_id in door.training if run_id.startswith(f"{found.id}:")],
        sampler_ids=door.samplers.of_session(found.id),
        user_metadata=found.user_metadata,
        display_name=found.display_name,
    )


@listing.get("/sessions")
async def sessions(door: Door, user: Caller, limit: Count = 20, offset: Count = 0) -> types.ListSessionsResponse:
    """The user's sessions that have not ended."""
    seen = [session.id for session in door.sessions.values() if user.is_operator or session.user == user.name]
    return types.ListSessionsResponse(sessions=seen[offset : offset + limit])


def _seen_by(user: User) -> str | None:
    return None if user.is_operator else user.name


def _found(door: Gateway, run_id: str) -> TrainingRunRow:
    row = door.database.run(run_id)
    if row is None:
        raise HTTPException(404, f"there is no training run {run_id}")
    return row


def _path(door: Gateway, run_id: str, kind: str, name: str) -> str:
    """The path of a checkpoint that exists. Raises HTTPException 404 for any other."""
    path = str(CheckpointPath(run_id=run_id, kind=kind, name=name))
    if door.database.checkpoint(path) is None:
        raise HTTPException(404, f"there is no checkpoint {path}")
    return path


def _run(door: Gateway, row: TrainingRunRow) -> types.TrainingRun:
    saved = [_checkpoint(checkpoint) for checkpoint in door.database.checkpoints(row.id)]
    newest: dict[str, Any] = {}
    for checkpoint in saved:
        newest.setdefault(checkpoint.checkpoint_type, checkpoint)
    return types.TrainingRun(
        training_run_id=row.id,
        base_model=row.base_model,
        model_owner=row.user or "local",
        is_lora=row.rank > 0,
        lora_rank=row.rank or None,
        last_request_time=_aware(row.last_request_at),
        last_checkpoint=newest.get("training"),
        last_sampler_checkpoint=newest.get("sampler"),
        user_metadata=row.user_metadata,
    )


def _checkpoint(row: CheckpointRow) -> types.Checkpoint:
    path = CheckpointPath.parse(row.path)
    return types.Checkpoint(
        checkpoint_id=f"{path.kind}/{path.name}",
        checkpoint_type=KINDS[path.kind],
        time=_aware(row.created_at),
        tinker_path=row.path,
        size_bytes=row.size_bytes,
        user_metadata=row.user_metadata,
        expires_at=None if row.expires_at is None else _aware(row.expires_at),
    )


def _aware(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC)  # SQLite gave it without a zone


VALID_S = 3600
"""How long an address works. The client asks for new ones five minutes before."""
downloads = APIRouter()


class Signatures:
    """Makes and checks the signatures of addresses. A server's signatures end with it."""

    def __init__(self) -> None:
        """Makes a secret of its own, with which it signs."""
        self._secret = secrets.token_bytes(32)  # random, so addresses of an earlier server are refused

    def sign(self, path: str, expires: int) -> str:
        """The signature of a path that may be fetched until `expires`, in seconds since 1970."""
        return hmac.new(self._secret, f"{expires} {path}".encode(), "sha256").hexdigest()

    def check(self, path: str, expires: int, signature: str) -> None:
        """Raises HTTPException 403 if this is not the path's signature, or no longer."""
        # takes the same time wherever the first difference is
        if not hmac.compare_digest(self.sign(path, expires), signature) or expires < time.time():
            raise HTTPException(403, "this address is not signed by this server, or has expired; ask for it again")


@downloads.get("/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, name: str, request: Request, door: Door
) -> types.ExternalWeightsUrlsResponse:
    """The addresses of the files of a checkpoint that `save_weights_external` wrote."""
    _, folder = door.archive.find(str(CheckpointPath(run_id=run_id, kind=EXPORTED, name=name)))
    signatures: Signatures = request.app.state.signatures
    expires = int(time.time()) + VALID_S
    urls: dict[str, str] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        relative = str(file.relative_to(folder))
        path = f"{DOWNLOADS}{run_id}/{name}/{relative}"
        query = urlencode({"expires": expires, "signature": signatures.sign(path, expires)})
        # the signature covers the path as the route will see it, unquoted
        urls[relative] = f"{str(request.base_url).rstrip('/')}{quote(path)}?{query}"
    return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


@downloads.get("/downloads/{run_id}/{name}/{relative:path}")
async def download(
    run_id: str, name: str, relative: str, expires: int, signature: str, request: Request
) -> FileResponse:
    """One file, to any client that has its address."""
    signatures: Signatures = request.app.state.signatures
    signatures.check(f"{DOWNLOADS}{run_id}/{name}/{relative}", expires, signature)
    gateway: Gateway = request.app.state.gateway
    _, folder = gateway.archive.find(str(CheckpointPath(run_id=run_id, kind=EXPORTED, name=name)))
    if not (folder / relative).is_file():
        raise HTTPException(404, f"there is no file {relative} in this checkpoint any more")
    return FileResponse(folder / relative)
