"""Engines over Hugging Face models: `fsdp2` and `fsdp1`."""
