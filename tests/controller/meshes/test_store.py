"""The shim that makes TorchStore run on today's Monarch, and whether it is still needed."""

from collections.abc import Callable
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty
from torchstore.controller import Controller

from controller.meshes.store import AsyncController


def _asynchronous(actor: type[Any]) -> set[bool]:
    import inspect

    endpoints = [getattr(actor, name) for name in dir(actor)]
    methods: list[Callable[..., Any]] = [e._method for e in endpoints if isinstance(e, EndpointProperty)]  # pyright: ignore[reportPrivateUsage]
    return {inspect.iscoroutinefunction(method) for method in methods}


def test_the_shim_is_still_needed() -> None:
    assert _asynchronous(Controller) == {True, False}, "TorchStore's Controller can be spawned: remove AsyncController"


def test_the_shim_makes_every_endpoint_asynchronous() -> None:
    assert _asynchronous(AsyncController) == {True}
