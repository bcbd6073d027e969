"""TODO trainer/engines/mfsdp."""
