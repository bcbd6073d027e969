"""Saves checkpoints one after the other, if asked to in the background while training continues.

A background save works on copies in host memory and uses a process group of its own, so that it cannot mix with the
next step or its collectives.
"""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.checkpoint import CheckpointInfo


class CheckpointSaver:
    """One per rank. Every rank makes the same calls in the same order; each is a collective."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_take_idle_time)
        # Half of a write's CPU time would go into checksums that torch does not read when it loads a file.
        torch.serialization.set_crc32_options(False)
        self._pending: Future[None] | None = None
        self._background_group: dist.ProcessGroup | None = None

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        info: CheckpointInfo,
        *,
        size_bytes: int,
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> None:
        """Writes nested dictionaries of tensors, sharded or not. `path` appears only once everything is on disk.

        With `asynchronous`, returns as soon as copies are made, and `wait` raises the error of a failed save. With
        `keep_last`, only that many checkpoints, this one and those of the highest versions, stay in its directory.
        Waits for the previous save first. Raises ValueError, before anything is written, if `keep_last` is below 1, if
        `path` exists and ownloop did not write it, if it cannot be written, or if there is no room for `size_bytes`;
        and OSError, on every rank, if one cannot write.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1")
        self.wait()
        path = path.absolute()
        checkpoint.begin(path, size_bytes)

        def prune() -> None:
            if keep_last is not None:
                checkpoint.keep_newest(path, keep_last)

        def write(tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
            checkpoint.write(path, tensors, group)
            checkpoint.complete(path, info, group)
            checkpoint.on_rank_0(prune, group)

        if not asynchronous:
            write(dict(state), None)
            return
        if dist.is_initialized() and self._background_group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._background_group = group
        self._pending = self._thread.submit(write, _copied(state), self._background_group)

    def wait(self) -> None:
        """Returns once no save is under way. Raises the error of the last one, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, as `wait` does, and frees the thread and the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._background_group is not None:
                dist.destroy_process_group(self._background_group)
                self._background_group = None


def _take_idle_time() -> None:
    """Gives the calling thread the lowest priority, so that a step has the processor first. Linux only."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else _copied(value)
        for key, value in state.items()
    }
