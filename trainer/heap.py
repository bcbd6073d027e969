"""Keeps the heap of a trainer that computes on the CPU from growing with every step.

With the settings of `rl.hardware.cpu_malloc_env`, glibc keeps freed memory. Rows have ever different lengths, so that
tensors leave holes into which later ones do not fit, and the heap reaches further with each step. Handing all of it
back after each step would cost a quarter of a small model's time, because the kernel clears every page that it gives
out. So it is handed back only once the process has grown.
"""

import resource
from collections.abc import Callable
from pathlib import Path

from rl.hardware import hand_back_memory

_GROWTH = 1.05


class Heap:
    """Hands freed memory back to the kernel once the process has grown by 5 % since the first step after the last time.

    The measure is taken anew each time, so that longer rows, which need more memory, are not taken for growth for ever.
    """

    def __init__(
        self, resident_bytes: Callable[[], int] | None = None, hand_back: Callable[[], object] | None = None
    ) -> None:
        """The functions tell what the process holds, and hand back what it has freed; by default glibc's."""
        self._resident_bytes = resident_bytes or _resident_bytes
        self._hand_back = hand_back or hand_back_memory
        self._settled: int | None = None

    def after_step(self) -> None:
        """To be called after each optimizer step."""
        resident = self._resident_bytes()
        if self._settled is None:
            self._settled = resident
        elif resident > _GROWTH * self._settled:
            self._hand_back()
            self._settled = None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
