"""What vLLM needs on a CPU: kernels and patches, each with its reason and the condition for its removal."""
