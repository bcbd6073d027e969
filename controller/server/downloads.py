"""Exported checkpoints over HTTP: addresses of their files, and the files.

`tinker checkpoint download` fetches files without a key. So their addresses are signed: the server gives them to the
checkpoint's user, and they work for an hour, or until the server ends.
"""

import hmac
import secrets
import time
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse
from tinker import types

from controller.server.access import DOWNLOADS, Door
from controller.server.archive import EXPORTED, CheckpointPath
from controller.server.gateway import Gateway

VALID_S = 3600
"""How long an address works. The client asks for new ones five minutes before."""
downloads = APIRouter()


class Signatures:
    """Makes and checks the signatures of addresses. Those of another server, or of the one before, do not count."""

    def __init__(self) -> None:
        """With a secret of its own."""
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str, expires: int) -> str:
        """The signature of a path that may be fetched until `expires`, in seconds since 1970."""
        return hmac.new(self._secret, f"{expires} {path}".encode(), "sha256").hexdigest()

    def check(self, path: str, expires: int, signature: str) -> None:
        """Raises HTTPException 403 if this is not the path's signature, or no longer."""
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
        urls[relative] = f"{str(request.base_url).rstrip('/')}{quote(path)}?{query}"
    return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


@downloads.get("/downloads/{run_id}/{name}/{relative:path}")
async def download(
    run_id: str, name: str, relative: str, expires: int, signature: str, request: Request
) -> FileResponse:
    """One file, to whoever has its address."""
    signatures: Signatures = request.app.state.signatures
    signatures.check(f"{DOWNLOADS}{run_id}/{name}/{relative}", expires, signature)
    gateway: Gateway = request.app.state.gateway
    _, folder = gateway.archive.find(str(CheckpointPath(run_id=run_id, kind=EXPORTED, name=name)))
    if not (folder / relative).is_file():
        raise HTTPException(404, f"there is no file {relative} in this checkpoint any more")
    return FileResponse(folder / relative)
