"""The engine `fsdp2`, and what engines over models of transformers share."""
