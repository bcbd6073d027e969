"""Keeps the heap of a process from growing with every step.

With the settings of `cpu_malloc_env`, which trainers and generators on the CPU have, glibc keeps freed memory. Rows and
requests differ in length, so tensors leave holes into which later ones do not fit, and the heap grows with each step.
Handing memory back is expensive, because the kernel has to find and clear every page again: on a virtual machine whose
host takes unused memory away, the next step of a model of 135 million parameters takes twice its time. So memory is
handed back only once the process has grown beyond what several steps needed.
"""

import gc
import resource
from collections.abc import Callable
from pathlib import Path

from rl.system.hardware import hand_back_memory

_GROWTH = 1.02
_STEPS_TO_SETTLE = 4


class Heap:
    """Hands freed memory back to the kernel once the process has grown by 2 % beyond the steps after the last time.

    The measure is taken anew each time, as the most of four steps: rows differ in length, and a process needs more
    than it holds after its first step.
    """

    def __init__(
        self, resident_bytes: Callable[[], int] | None = None, hand_back: Callable[[], object] | None = None
    ) -> None:
        """The functions return the bytes that the process holds, and hand freed memory back; by default glibc's."""
        self._resident_bytes = resident_bytes or _resident_bytes
        self._hand_back = hand_back or hand_back_memory
        self._settled, self._steps = 0, 0

    def after_step(self) -> None:
        """To be called after each optimizer step of a trainer, and each pull of a generator."""
        resident = self._resident_bytes()
        if self._steps < _STEPS_TO_SETTLE:
            self._settled = max(self._settled, resident)
            self._steps += 1
        elif resident > _GROWTH * self._settled:
            self._hand_back()
            self._settled, self._steps = 0, 0


def hand_back_garbage() -> None:
    """Frees garbage in cycles and hands its memory back: for the end of work that leaves much of it, such as drawing.

    Takes most of a second, in which all threads wait, unless the collector passes over long-lived objects
    (`rl.startup`).
    """
    gc.collect()
    hand_back_memory()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
