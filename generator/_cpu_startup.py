"""What vLLM 0.32 does at start-up that an engine on the CPU never uses. `_compat.py` says how patches are kept.

`without_compiler` goes around the import of vLLM, before which nothing of it can be patched, and around the building of
an engine; `patch_startup` is one of the patches for the CPU.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._library import triton

from rl.deferred_imports import defer_compiler

_COMPILER_PATCHES = "vllm.env_override"
_COMPILED_MODELS = "vllm.compilation.decorators"
_SYMBOLIC_CONVERT = "torch._dynamo.symbolic_convert"
_GPU_WARMUPS: Mapping[str, Sequence[str]] = {
    "vllm.model_executor.warmup.kernel_warmup": ("kernel_warmup",),
    "vllm.v1.worker.gpu.warmup": ("run_mixed_prefill_decode_warmup", "warmup_kernels"),
}
"""Modules that import the model runner for GPUs, and the functions that a worker for the CPU imports of them."""


@contextlib.contextmanager
def without_compiler() -> Generator[None]:
    """Within the block, vLLM is imported, and an engine built, without PyTorch's compiler.

    An engine on the CPU compiles nothing. But vLLM patches the compiler when it is imported, and so imports it. Those
    patches now wait until something needs them. A function that vLLM marks with `torch.compile` stays as it is, a
    Triton kernel is not searched for other kernels, and what warms up a GPU is not imported.

    Remove when neither `import vllm` nor an engine on the CPU imports `torch._dynamo`.
    """
    defer_compiler()
    compiler, kernels_within = torch.compile, triton.get_inner_triton_kernels
    stand_ins = {_COMPILER_PATCHES: ModuleType(_COMPILER_PATCHES)}
    for name, functions in _GPU_WARMUPS.items():
        stand_ins[name] = _module(name, **dict.fromkeys(functions))
    for name, stand_in in stand_ins.items():
        sys.modules.setdefault(name, stand_in)
    torch.compile, triton.get_inner_triton_kernels = _uncompiled, _no_kernels
    try:
        _import_models_decorator()
        yield
    finally:
        torch.compile, triton.get_inner_triton_kernels = compiler, kernels_within
        for name, stand_in in stand_ins.items():
            if sys.modules[name] is stand_in:
                del sys.modules[name]  # whoever imports it next gets vLLM's own


def _import_models_decorator() -> None:
    """Imports the decorator of vLLM's models, which needs a class of the compiler when it compiles one of them."""
    if _SYMBOLIC_CONVERT in sys.modules or _COMPILED_MODELS in sys.modules:
        return
    sys.modules[_SYMBOLIC_CONVERT] = _module(_SYMBOLIC_CONVERT, InliningInstructionTranslator=object)
    try:
        import_module(_COMPILED_MODELS)
    finally:
        del sys.modules[_SYMBOLIC_CONVERT]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _no_kernels(function: Any) -> list[Any]:
    del function
    return []


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
