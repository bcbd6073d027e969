"""Lets Megatron-FSDP run without CUDA: streams and events that do nothing, as on one stream. For tests only."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from trainer.config import TrainerConfig
from trainer.engines.base import Engine


class _Nothing:
    """A stream or an event of a device that does one thing after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Nothing":
        return self

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def install(replace: Callable[[object, str, Any], None]) -> None:
    """Replaces what Megatron-FSDP uses of CUDA, by `setattr` or by a `monkeypatch.setattr` that undoes it."""
    for name, value in {
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "stream": lambda stream: nullcontext(),
        "current_device": lambda: 0,
        "synchronize": lambda *args: None,
    }.items():
        replace(torch.cuda, name, value)
    replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    replace(torch.Tensor, "record_stream", lambda self, stream: None)


def build_on_cpu(config: TrainerConfig) -> Engine:
    """The engine, without the check that refuses it on this host. In a rank's process, torch stays changed."""
    stream: Any = torch.cuda.Stream
    if stream is not _Nothing:
        install(setattr)
    # Imported here, because the package is optional.
    from ownloop_megatron.mfsdp.engine import MegatronFsdpEngine

    return MegatronFsdpEngine(config)
