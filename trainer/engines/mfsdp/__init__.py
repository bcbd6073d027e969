"""The engine `megatron_fsdp`, on Megatron-FSDP. An optional part: only an entry point names its row."""

from trainer.engine_table import EngineEntry

ENTRY = EngineEntry(
    engine="trainer.engines.mfsdp.engine:MegatronFsdpEngine",
    layout_check="trainer.engines.mfsdp.layout_check:check_layout",
    requires="megatron_fsdp",
    takes_args=True,
)
