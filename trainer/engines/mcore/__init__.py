"""The megatron engine: Megatron-core's model and its tensor and expert parallelism, driven by our loop."""
