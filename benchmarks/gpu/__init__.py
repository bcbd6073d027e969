"""What `make gpu-check` runs, each in a process of its own: `python -m benchmarks.gpu.NAME [--smoke]`."""
