"""The training engines by name: a table of the core's engines, and the entry points of all others.

An engine of the core is a folder of its own and a row here. A plug-in's has its row in a module of its own, which an
entry point of the group `ownloop.engines` names. Imports no engine, so that `TrainerConfig` can check an engine's name
without loading torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rl.checks import unknown_name
from rl.system.plugins import find, load_all


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where to find an engine, as importable names `module:attribute`."""

    engine: str
    """The subclass of `trainer.engines.base.Engine`; a trainer rank calls it with its `TrainerConfig`."""
    layout_check: str
    """A `trainer.engines.model_check.LayoutCheck`. The controller imports its module, so the module must not import
    torchtitan or transformers."""
    requires: str = ""
    """A module that the engine needs. Where it is missing, the user reads to install the plug-in again."""
    takes_args: bool = False
    """Whether the engine reads `TrainerConfig.engine_args`; its layout check checks them."""
    trains_adapters: bool = False
    """Whether the engine freezes its model under `TrainerConfig.lora` and has layers that can be adapted."""
    takes_muon: bool = False
    """Whether `optim_step` takes `MuonParams`: its parameters are whole matrices, or DTensors of them."""
    replays_routes: bool = False
    """Whether the layers of a mixture take the experts that `Datum.routes` names."""
    numerics: str = ""
    """The `GeneratorConfig.numerics` of the generators that compute bit by bit as this engine does; empty for those
    that compute as vLLM does."""


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
}


def find_engine(name: str) -> EngineEntry:
    """The row of an engine of this table or of a plug-in. Raises ValueError, naming those there are."""
    entry = ENGINES.get(name) or find("engines", name, EngineEntry)
    if entry is None:
        raise unknown_name("TrainerConfig.engine", name, all_engines(), "engines")
    return entry


def all_engines() -> Mapping[str, EngineEntry]:
    """The rows of all engines, this table's first. Leaves out broken ones of plug-ins."""
    return {**ENGINES, **load_all("engines", EngineEntry), **ENGINES}
