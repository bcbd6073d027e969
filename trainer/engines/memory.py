"""Measures the peak memory of this rank in each phase, for the metrics."""

import contextlib
import resource
from collections.abc import Generator
from pathlib import Path

import torch

_RESET_PEAK = "5"  # see proc(5)


class PeakMemory:
    """Most bytes held in each phase: those of all tensors on a GPU, those of the whole process on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measures the block. On a CPU whose kernel cannot reset the peak, it counts from the start of the process."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self.peak_bytes())

    def peak_bytes(self) -> int:
        """Most bytes held since the phase began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def take(self) -> dict[str, float]:
        """Returns `memory_peak_bytes_PHASE_max` of every phase measured since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory_peak_bytes_{name}_max": float(peak) for name, peak in peaks.items()}
