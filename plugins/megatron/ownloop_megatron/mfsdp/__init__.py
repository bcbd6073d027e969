"""The engine `megatron_fsdp`, on Megatron-FSDP. Only an entry point names its row."""

from trainer.engine_table import EngineEntry

ENTRY = EngineEntry(
    engine="ownloop_megatron.mfsdp.engine:MegatronFsdpEngine",
    layout_check="ownloop_megatron.mfsdp.layout_check:check_layout",
    requires="megatron_fsdp",
    takes_args=True,
)
