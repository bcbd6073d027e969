"""Measures the peak memory of this rank in each phase, for the metrics."""

import contextlib
import re
import resource
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

_RESET_PEAK = "5"  # see proc(5)


class PeakMemory:
    """Most bytes held in each phase: those of all tensors on a GPU, those of whole processes on the CPU."""

    def __init__(self, device: torch.device, children: Sequence[int] = ()) -> None:
        """`children` are the numbers of processes that compute for this one on the CPU, and count with it."""
        self._device = device
        self._children = children
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measures the block. On a CPU whose kernel cannot reset the peak, it counts from the start of the process."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                for process in ("self", *self._children):
                    Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK)
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self.peak_bytes())

    def peak_bytes(self) -> int:
        """Most bytes held since the phase began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own + sum(map(_peak_bytes_of, self._children))

    def take(self) -> dict[str, float]:
        """Returns `memory_peak_bytes_PHASE_max` of every phase measured since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory_peak_bytes_{name}_max": float(peak) for name, peak in peaks.items()}


def _peak_bytes_of(process: int) -> int:
    """Most bytes that another process held; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
