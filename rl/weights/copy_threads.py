"""Threads that run many small tensor operations side by side.

Torch splits each operation among its threads and joins them again. That takes 70 microseconds, as long as copying one
of a model's hundreds of tensors. Here each thread runs whole operations, one after the other, until none is left.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

# vLLM replaces the public function.
_set_num_threads = torch._C.set_num_threads  # pyright: ignore[reportPrivateUsage]
_PIECE_BYTES = 8 << 20  # larger tensors are cut, so that no thread is left with a long copy at the end


class Workers:
    """As many threads as torch uses in this process. They end with the process, or when this object is collected."""

    def __init__(self) -> None:
        """The number of threads is the calling thread's `torch.get_num_threads()`."""
        self._num_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            self._pool = ThreadPoolExecutor(self._num_threads, "weights", initializer=_use_one_thread)
            all_here = threading.Barrier(self._num_threads)
            wait([self._pool.submit(all_here.wait) for _ in range(self._num_threads)])
            _set_num_threads(self._num_threads)  # of this thread, and of those to come

    def run(self, operations: Iterable[Callable[[], object]]) -> None:
        """Runs all operations, in any order. The longest should come first. Raises the error of one that fails."""
        operations = list(operations)
        if self._pool is None or len(operations) < 2:
            with torch.no_grad():
                for operation in operations:
                    operation()
        else:
            self._share(operations)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each (destination, source) pair of equal shapes, and casts. Large ones are cut along dim 0."""
        self.run(self.copies(pairs))

    def copies(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        """The operations of `copy`, which can be run any number of times."""
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for destination, source in pairs:
            num_pieces = -(-destination.nbytes // _PIECE_BYTES)
            if num_pieces > 1 and self._pool is not None:
                pieces += zip(destination.chunk(num_pieces), source.chunk(num_pieces), strict=True)
            else:
                pieces.append((destination, source))
        pieces.sort(key=lambda piece: piece[0].nbytes, reverse=True)
        return [_copy(destination, source) for destination, source in pieces]

    def _share(self, operations: Iterable[Callable[[], object]]) -> None:
        assert self._pool is not None
        left = deque(operations)

        def work() -> None:
            with torch.no_grad():
                while True:
                    try:
                        operation = left.popleft()
                    except IndexError:
                        return
                    operation()

        working = [self._pool.submit(work) for _ in range(self._num_threads)]
        for future in wait(working).done:
            future.result()


def _use_one_thread() -> None:
    """Makes torch's operations run in this thread alone."""
    torch.get_num_threads()  # a thread takes the number of the whole process when torch first looks for it there
    _set_num_threads(1)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: destination.copy_(source)
