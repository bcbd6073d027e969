"""The one place that imports Megatron-FSDP, an optional package that type checkers do not see, and its one patch."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import cast

_CORE = "megatron.core"


@contextmanager
def _without_megatron_core() -> Generator[None]:
    """Within the block, Megatron-core cannot be imported.

    Reason: Megatron-FSDP takes the settings class of Megatron-core where it finds one. That of Megatron-core 0.16, the
    last for Python 3.11, lacks fields that Megatron-FSDP sets.
    Remove when the settings class of the oldest supported Megatron-core has them.
    """
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    hidden = {name: modules.pop(name) for name in list(modules) if name == _CORE or name.startswith(f"{_CORE}.")}
    modules[_CORE] = None  # Python raises ImportError for such an entry
    try:
        yield
    finally:
        del modules[_CORE]
        modules.update(hidden)


with _without_megatron_core():
    _package = import_module("megatron_fsdp")

MixedPrecisionPolicy = _package.MixedPrecisionPolicy
fully_shard_model = _package.fully_shard_model
