"""The engine `megatron`, on Megatron-core. Only an entry point names its row."""

from trainer.engine_table import EngineEntry

ENTRY = EngineEntry(
    engine="ownloop_megatron.mcore.engine:MegatronEngine",
    layout_check="ownloop_megatron.mcore.layout_check:check_layout",
    requires="megatron",
    takes_args=True,
    replays_routes=True,
)
