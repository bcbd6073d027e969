"""A KV cache on the CPU takes memory as it fills. A patch of vLLM 0.32; `_compat.py` says when it is applied."""

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner as model_runner
from torch.overrides import TorchFunctionMode


def patch_kv_cache() -> None:
    """Has vLLM take the cache's zeros from the kernel, which gives out a page when it is first written to.

    vLLM writes them itself. With 1.6 GB for SmolLM2 that is a third of the time in which an engine is built on a
    virtual machine whose host takes unused memory away, and a short run never uses most of them.

    Remove when vLLM no longer writes to the cache before there are requests.
    """
    if not isinstance(model_runner.allocate_kv_cache, _Unwritten):
        model_runner.allocate_kv_cache = _Unwritten(model_runner.allocate_kv_cache)


class _Unwritten:
    def __init__(self, original: Callable[..., dict[str, torch.Tensor]]) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with _ZerosOfTheKernel():
            return self._original(*args, **kwargs)


class _ZerosOfTheKernel(TorchFunctionMode):
    """Within it, `torch.zeros(num_bytes, dtype=torch.int8, device=...)` on the CPU writes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is not torch.zeros or given.get("dtype") != torch.int8 or torch.device(given["device"]).type != "cpu":
            return func(*args, **given)
        pages = mmap.mmap(-1, math.prod(args), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.int8)  # keeps `pages`
