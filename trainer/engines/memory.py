"""How much memory this rank has needed, for the metrics."""

import resource

import torch


def reset_peak(device: torch.device) -> None:
    """Begins a new measurement, where the device allows that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes held at any time: by tensors since `reset_peak` on a GPU, by the process so far on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
