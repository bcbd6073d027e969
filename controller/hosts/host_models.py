"""Sees to it that a host has a model: checks the one that is there, or copies it from here, and says how far it is."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from controller.hosts.addresses import own_address_towards
from controller.hosts.host_groups import Tell
from controller.hosts.model_copies import ModelServer, check_same_model, model_files
from controller.hosts.remote_host import Host
from controller.processes.errors import HostLostError

_TELL_S = 5.0
_POLL_S = 0.1
_SLOWEST_BYTES_PER_S = 1e6


async def ensure_model(host: Host, model: Path, files: Mapping[str, str], tell: Tell) -> None:
    """Returns once the host has the model, with these files, in the same place as this host.

    Raises ValueError if it has another one there, or cannot take it, and `HostLostError`.
    """
    async with host.models:  # two meshes on one host may need the same one
        if not await host.ask(model_files, model):
            await _copy(host, model, tell)
        await host.ask(check_same_model, model, files)


async def _copy(host: Host, model: Path, tell: Tell) -> None:
    server = ModelServer(model, own_address_towards(host.facts.address))
    total, started = server.offer.num_bytes, time.monotonic()
    within_s = 60 + total / _SLOWEST_BYTES_PER_S
    received = asyncio.create_task(host.receive_model(server.offer, within_s))
    tell(f"copying the model {model.name} to {host.name}: {total / 1e9:.2f} GB")
    told = started
    try:
        while not received.done():
            await asyncio.wait({received}, timeout=_POLL_S)
            if host.lost is not None:
                raise HostLostError(host.name, f"host {host.name} is lost: {host.lost}")
            if (now := time.monotonic()) > told + _TELL_S:
                told, sent = now, server.sent_bytes
                tell(
                    f"copying the model {model.name} to {host.name}: {sent / total:.0%} of {total / 1e9:.1f} GB, "
                    f"{sent / (now - started) / 1e6:.0f} MB/s"
                )
        await received
    finally:
        received.cancel()
        server.close()
