"""The engines megatron and megatron_fsdp of ownloop."""
