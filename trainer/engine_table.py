"""The training engines by name: a table of the core's engines, and the entry points of all others.

An engine of the core is a folder of its own and a row here. An optional one, of this repository or of another package,
has its row in a module of its own, and an entry point of the group `ownloop.engines` names it. Imports no engine, so
that `TrainerConfig` can check an engine's name without loading torch.
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
    takes_muon: bool = False
    """Whether `optim_step` takes `MuonParams`: its parameters are whole matrices, or DTensors of them."""
    replays_routes: bool = False
    """Whether the layers of a mixture take the experts that `Datum.routes` names."""


ENGINES: Mapping[str, EngineEntry] = {
    "torchtitan": EngineEntry(
        engine="trainer.engines.titan.engine:TitanEngine",
        layout_check="trainer.engines.titan.layout_check:check_layout",
        trains_adapters=True,
        takes_muon=True,
        replays_routes=True,
    ),
    "fsdp2": EngineEntry(
        engine="trainer.engines.hf.fsdp2:Fsdp2Engine",
        layout_check="trainer.engines.hf.layout_check:check_layout",
        trains_adapters=True,
        takes_muon=True,
    ),
    "fsdp1": EngineEntry(
        engine="trainer.engines.hf.fsdp1:Fsdp1Engine",
        layout_check="trainer.engines.hf.layout_check:check_layout",
    ),
}


def find_engine(name: str) -> EngineEntry:
    """The row of an engine of this table or of an installed package. Raises ValueError, naming those there are."""
    if name in ENGINES:
        return ENGINES[name]
    optional = {entry_point.name: entry_point for entry_point in entry_points(group=_GROUP)}
    check_known("TrainerConfig.engine", name, [*ENGINES, *optional])
    entry = optional[name].load()
    if not isinstance(entry, EngineEntry):
        raise ValueError(f"the entry point {name!r} of {_GROUP} names {entry!r}; an EngineEntry is needed")
    return entry


def all_engines() -> Mapping[str, EngineEntry]:
    """The rows of all engines, this table's first. Leaves out entry points that name something else."""
    optional = {entry_point.name: entry_point.load() for entry_point in entry_points(group=_GROUP)}
    return {**ENGINES, **{name: entry for name, entry in optional.items() if isinstance(entry, EngineEntry)}}
