"""The engine `fsdp1`, on torch's `FullyShardedDataParallel`. Only an entry point names its row."""

from trainer.engine_table import EngineEntry

ENTRY = EngineEntry(
    engine="ownloop_megatron.fsdp1.engine:Fsdp1Engine",
    layout_check="ownloop_megatron.flat_check:check_layout",
)
