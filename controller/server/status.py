"""The status page: what goes on in a server, for its operator, and for each user what is theirs."""

import asyncio
import shutil
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
from fastapi import APIRouter, Response

from controller.server.access import Caller, Door
from controller.server.gateway import ClientSession, Gateway
from controller.server.keys import User
from controller.server.throughput import BUCKET_S
from rl.lora import Policy

status_routes = APIRouter()
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@status_routes.get("/")
async def page() -> Response:
    """The page: one file, which asks for `/status.json` every other second."""
    text = files("controller.server").joinpath("status.html").read_text(encoding="utf-8")
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


@status_routes.get("/status.json")
async def status(door: Door, user: Caller) -> dict[str, Any]:
    """What the page shows."""
    memory = await asyncio.to_thread(_memory)
    return {**status_of(door, user), **memory, "gpus": await _gpus()}


def status_of(gateway: Gateway, user: User) -> dict[str, Any]:
    """The models, and the user's sessions; everyone's for an operator."""
    seen = [session for session in gateway.sessions.values() if user.is_operator or session.user == user.name]
    return {
        "user": user.name,
        "is_operator": user.is_operator,
        "uptime_s": round(time.monotonic() - gateway.started, 1),
        "requests_waiting": gateway.answers.num_waiting,
        "samples_running": gateway.samplers.num_running,
        "bucket_s": BUCKET_S,
        "models": [
            {
                "names": model.names,
                "snapshots": len(model.snapshots),
                "max_snapshots": model.snapshots.max_kept,
                "trained": model.throughput.history("trained"),
                "sampled": model.throughput.history("sampled"),
                "trained_tokens": model.throughput.totals["trained"],
                "sampled_tokens": model.throughput.totals["sampled"],
            }
            for model in gateway.models
        ],
        "sessions": [_session(gateway, session) for session in seen],
    }


def _session(gateway: Gateway, session: ClientSession) -> dict[str, Any]:
    clients = [client for run_id, client in gateway.training.items() if run_id.startswith(f"{session.id}:")]
    samplers = [gateway.samplers.find(sampler_id) for sampler_id in gateway.samplers.of_session(session.id)]
    return {
        "id": session.id,
        "user": session.user,
        "silent_s": round(asyncio.get_running_loop().time() - session.last_seen, 1),
        "training": [
            {
                "id": client.run.id,
                "model": client.run.base_model,
                "rank": client.run.rank,
                "steps": client.num_steps,
                "tokens": client.num_tokens,
                "queue": client.turns.num_waiting,
                "is_running": client.turns.is_running,
                "checkpoints": len(gateway.database.checkpoints(client.run.id)),
            }
            for client in clients
        ],
        "sampling": [
            {
                "id": sampler.id,
                "model": sampler.base_model,
                "policy": sampler.path or _in_words(sampler.policy),
                "kept": sampler.policy is None or sampler.policy in sampler.model.snapshots,
            }
            for sampler in samplers
            if sampler is not None
        ],
    }


def _in_words(policy: Policy) -> str:
    if policy is None:
        return "the base model"
    return f"version {policy[1]} of {policy[0]}" if isinstance(policy, tuple) else f"the newest of {policy}"


def _memory() -> dict[str, Any]:
    """Resident memory of the server and of the processes that it started, and of the host, in bytes."""
    own = psutil.Process()
    children: list[int] = []
    for child in own.children(recursive=True):
        try:
            children.append(child.memory_info().rss)
        except psutil.NoSuchProcess:  # it ended in between
            continue
    host = psutil.virtual_memory()
    return {
        "memory": {"server": own.memory_info().rss, "processes": children, "used": host.used, "total": host.total},
    }


async def _gpus() -> list[dict[str, Any]]:
    """Memory and load of every GPU, as nvidia-smi tells them."""
    if not Path("/proc/driver/nvidia/version").exists() or (command := shutil.which("nvidia-smi")) is None:
        return []
    query = ["--query-gpu=name,memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits"]
    asked = await asyncio.create_subprocess_exec(command, *query, stdout=asyncio.subprocess.PIPE)
    output, _ = await asked.communicate()
    rows = [line.split(", ") for line in output.decode().splitlines()]
    return [
        {"name": row[0], "used_mib": row[1], "total_mib": row[2], "busy_percent": row[3]}
        for row in rows
        if len(row) == 4
    ]
