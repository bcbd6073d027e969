"""Threads that share many small tensor operations among the cores.

Torch splits every operation among its threads and joins them again: 70 microseconds for each of a model's hundreds of
tensors, as long as copying one of them takes. Here every thread computes alone, and takes the next operation when it is
done with one.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_PIECE_BYTES = 8 << 20


class Workers:
    """As many threads as torch computes with here. They end with the process, or when this is collected."""

    def __init__(self) -> None:
        """Takes its number of threads from the calling thread's `torch.get_num_threads()`."""
        self._num_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            # Not `torch.set_num_threads`, which vLLM replaces. It sets the calling thread's number, and that of
            # threads that compute for the first time later, hence once more here when all workers have set theirs.
            set_num_threads = torch._C.set_num_threads  # pyright: ignore[reportPrivateUsage]
            self._pool = ThreadPoolExecutor(self._num_threads, "weights", initializer=set_num_threads, initargs=(1,))
            all_here = threading.Barrier(self._num_threads)
            wait([self._pool.submit(all_here.wait) for _ in range(self._num_threads)])
            set_num_threads(self._num_threads)

    def run(self, operations: Iterable[Callable[[], object]]) -> None:
        """Runs all of them, in any order; begin with the longest. Raises what the first that fails raises."""
        operations = list(operations)
        if self._pool is None or len(operations) < 2:
            with torch.no_grad():
                for operation in operations:
                    operation()
        else:
            self._share(operations)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies every (destination, source) of equal shapes, casting on the way. Large ones are cut along dim 0."""
        self.run(self.copies(pairs))

    def copies(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        """What `copy` runs, to be run as often as the tensors live."""
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


def _copy(destination: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: destination.copy_(source)
