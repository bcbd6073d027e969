"""Saves checkpoints one after the other, while training goes on if asked to.

A save in the background works on copies in host memory and talks to its peers over a process group of its own, so that
neither the next step nor its collectives get in its way.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trainer import checkpoint
from trainer.checkpoint import CheckpointInfo


class CheckpointSaver:
    """One per rank. Every rank makes the same calls in the same order; each is a collective."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
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
        """Writes nested dictionaries of tensors, sharded or not; `path` appears only once all of it is on disk.

        With `asynchronous` returns as soon as copies are made; `wait` says how it ended. With `keep_last`, that many
        checkpoints of the highest policy versions stay in the directory of `path`, and the others go.
        Waits for the save before. Raises ValueError, before anything is written, when `path` exists and is not ours,
        cannot be written, or has no room for `size_bytes`, and for a `keep_last` below 1.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1")
        self.wait()
        path = path.absolute()
        partial = checkpoint.begin(path, size_bytes)

        def prune() -> None:
            if keep_last is not None:
                checkpoint.keep_newest(path.parent, keep_last)

        def write(tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
            dcp.save(tensors, checkpoint_id=partial, process_group=group)
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
        """Returns once no save is under way. Raises what the last one raised, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else _copied(value)
        for key, value in state.items()
    }
