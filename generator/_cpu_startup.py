"""What vLLM 0.32 does at start-up that an engine on the CPU never uses. `_compat.py` says how patches are kept.

`without_compiler` goes around the import of vLLM, before which nothing of it can be patched, and around the building of
an engine; `patch_startup` is one of the patches for the CPU.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_COMPILER_PATCHES = "vllm.env_override"


@contextlib.contextmanager
def without_compiler() -> Generator[None]:
    """Within the block, vLLM is imported, and an engine built, without PyTorch's compiler.

    An engine on the CPU compiles nothing. But vLLM patches the compiler when it is imported, and so imports it. Those
    patches now wait until something needs them. A function that vLLM marks with `torch.compile` stays as it is.

    Remove when neither `import vllm` nor an engine on the CPU imports `torch._inductor.lowering`.
    """
    compiler, deferred = torch.compile, ModuleType(_COMPILER_PATCHES)
    sys.modules.setdefault(_COMPILER_PATCHES, deferred)
    torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler
        if sys.modules[_COMPILER_PATCHES] is deferred:
            del sys.modules[_COMPILER_PATCHES]  # whoever imports it next gets vLLM's own


def patch_startup() -> None:
    """Has vLLM replace Triton's kernels, and copy tokenizers, only where something may use them."""
    import vllm.renderers.hf as renderers
    from vllm.triton_utils import dispatcher

    kernels: Any = dispatcher
    if not isinstance(kernels._rebind_kernels, _WithinVLLM):
        kernels._rebind_kernels = _WithinVLLM(kernels._rebind_kernels, kernels)
    if not isinstance(renderers.maybe_make_thread_pool, _CopiesOnDemand):
        renderers.maybe_make_thread_pool = _CopiesOnDemand(renderers.maybe_make_thread_pool)


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile`, without compiling."""
    del options
    return (lambda function: function) if model is None else model


class _WithinVLLM:
    """Looks for references to vLLM's kernels in vLLM's modules, and not in all 5,000 of the process.

    Remove when `_rebind_kernels` in `vllm/triton_utils/dispatcher.py` does so itself.
    """

    def __init__(self, original: Callable[[Any], None], dispatcher: Any) -> None:
        self._original = original
        self._dispatcher = dispatcher

    def __call__(self, overrides: Any) -> None:
        modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
        self._dispatcher.sys = SimpleNamespace(modules=modules)
        try:
            self._original(overrides)
        finally:
            self._dispatcher.sys = sys


class _CopiesOnDemand:
    """Copies a tokenizer when a second thread needs it, and not beforehand. A request of tokens needs no copy.

    Remove when `maybe_make_thread_pool` in `vllm/tokenizers/hf.py` fills its pool on demand.
    """

    def __init__(self, original: Callable[[Any, int], Any]) -> None:
        self._original = original

    def __call__(self, tokenizer: Any, copies: int = 1) -> Any:
        del copies  # an empty pool makes the copies that it lacks
        return self._original(tokenizer, 0)
