"""The one table of training engines. A new engine is a folder of its own and a row here.

An engine of another package has its row there, as the object that an entry point of the group `ownloop.engines` names.
Imports no engine, so that `TrainerConfig` can check an engine's name without loading torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from rl.checks import check_known

_GROUP = "ownloop.engines"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where to find an engine, as importable names `module:attribute`."""

    engine: str
    """The subclass of `trainer.engines.base.Engine`; a trainer rank calls it with its `TrainerConfig`."""
    layout_check: str
    """A `trainer.engines.model_check.LayoutCheck`. The controller imports its module, so the module must not import
    torchtitan or transformers."""
    requires: str = ""
    """A package that is not always installed and that the engine needs, by the name of its extra, which is that of the
    module that it brings."""
    takes_args: bool = False
    """Whether the engine reads `TrainerConfig.engine_args`; its layout check checks them."""
    trains_adapters: bool = False
    """Whether the engine freezes its model under `TrainerConfig.lora` and has layers that can be adapted."""


ENGINES: Mapping[str, EngineEntry] = {
    "torchtitan": EngineEntry(
        engine="trainer.engines.titan.engine:TitanEngine",
        layout_check="trainer.engines.titan.layout_check:check_layout",
        trains_adapters=True,
    ),
    "fsdp2": EngineEntry(
        engine="trainer.engines.hf.fsdp2:Fsdp2Engine",
        layout_check="trainer.engines.hf.layout_check:check_layout",
        trains_adapters=True,
    ),
    "fsdp1": EngineEntry(
        engine="trainer.engines.hf.fsdp1:Fsdp1Engine",
        layout_check="trainer.engines.hf.layout_check:check_layout",
    ),
    "megatron": EngineEntry(
        engine="trainer.engines.mcore.engine:MegatronEngine",
        layout_check="trainer.engines.mcore.layout_check:check_layout",
        requires="megatron",
        takes_args=True,
    ),
    "megatron_fsdp": EngineEntry(
        engine="trainer.engines.mfsdp.engine:MegatronFsdpEngine",
        layout_check="trainer.engines.mfsdp.layout_check:check_layout",
        requires="megatron_fsdp",
        takes_args=True,
    ),
}


def find_engine(name: str) -> EngineEntry:
    """The row of an engine of this table or of an installed package. Raises ValueError, naming those there are."""
    if name in ENGINES:
        return ENGINES[name]
    installed = {entry_point.name: entry_point for entry_point in entry_points(group=_GROUP)}
    check_known("TrainerConfig.engine", name, [*ENGINES, *installed])
    entry = installed[name].load()
    if not isinstance(entry, EngineEntry):
        raise ValueError(f"the entry point {name!r} of {_GROUP} names {entry!r}; an EngineEntry is needed")
    return entry
