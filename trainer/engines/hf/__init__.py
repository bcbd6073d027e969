"""The engines over models of transformers: `fsdp2` and `fsdp1`."""
