"""Computes on the CPU what kernels of a GPU would have computed, over the memory of `runtime.c`, which is the host's.

    torch.nn, FSDP2, DTensor, autograd          real
    an operator of CUDA tensors ---> PretendedGPU ---> the same operator of CPU tensors over the same memory
    torch's allocator, streams, copies, pinned memory, CUDA IPC          real, on runtime.c

Views, allocations, streams and collectives are left to torch's CUDA build itself. `computes=False` computes nothing:
operators only allocate what they return, so that torch's own allocator counts the memory that a step takes.

An operator whose tensors lie on the CPU and a GPU, or on two GPUs, raises as CUDA does. Compilers are switched off.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.gpu_pretended import vllm_kernels
from tests.gpu_pretended.kernels import COMPUTED, SHAPED, flex_attention, on_host
from tests.gpu_pretended.startup.after_import import AfterImport

_NO_KERNEL = {
    f"aten::{name}"
    for name in (
        *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "detach"),
        *("detach_", "record_stream", "is_pinned", "_pin_memory", "pin_memory", "lift_fresh", "alias", "_unsafe_view"),
        *("_reshape_alias", "sym_size", "is_same_size", "_version", "requires_grad_", "_backward", "retain_grad"),
    )
}
"""Operators that allocate, look or share memory, and run as they are."""
_LEFT_ALONE = ("c10d::", "_c10d_functional::", "profiler::", "prims::", "prim::")
_MIXES_DEVICES = {
    f"aten::{name}"
    for name in (
        *("copy_", "_foreach_copy_", "_to_copy", "to", "set_", "_copy_from", "_fused_adamw_"),
        *("index", "index_put_", "_index_put_impl_", "index_put"),
    )
} | {"vllm::lora_shrink", "vllm::lora_expand"}
"""Operators that CUDA lets have tensors of the CPU too, such as indices and flags."""
_COPIES = {"aten::copy_", "aten::_foreach_copy_"}
_KERNELS = {**COMPUTED, **vllm_kernels.COMPUTED}

not_computed: set[str] = set()
"""Operators of extensions that were called: what they should have written is arbitrary."""


def on_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on a pretended GPU, with its strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


class PretendedGPU(TorchDispatchMode):
    """Computes, in the threads in which it is active."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self._computes = computes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        kwargs = kwargs or {}
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **kwargs)
        if not all(map(_is_plain, types)):
            return NotImplemented  # a DTensor, say, calls this mode again with its parts
        flat, spec = tree_flatten((args, kwargs))
        device = _device_of(flat)
        name = func._schema.name
        if torch.is_inference_mode_enabled() and _is_composite(func.name()):  # torch takes it apart otherwise
            with self:
                return func.decompose(*args, **kwargs)
        if device is None or func.is_view or name in _NO_KERNEL or name.startswith(_LEFT_ALONE):
            return func(*args, **kwargs)
        _check_devices(name, [x for x in flat if isinstance(x, Tensor)])
        if self._computes:
            return self._compute(func, flat, spec, device)
        return self._allocate(func, flat, spec, device)

    def _compute(self, func: Any, flat: Sequence[Any], spec: Any, device: torch.device) -> Any:
        name, originals = func._schema.name, dict[int, tuple[Tensor, Tensor]]()
        args, kwargs = tree_unflatten([_moved(x, torch.device("cpu"), on_host, originals) for x in flat], spec)
        try:
            result = _by_definition(_KERNELS.get(name, func), args, kwargs)
        except NotImplementedError:
            if name.startswith("aten::"):
                raise
            not_computed.add(name)
            args, kwargs = tree_unflatten(list(flat), spec)
            with self:  # an extension's own kernel, which does nothing, or a function of other operators
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)  # pyright: ignore
        return tree_map(lambda x: _back(x, originals, lambda made: on_gpu(made, device), device), result)

    def _allocate(self, func: Any, flat: Sequence[Any], spec: Any, device: torch.device) -> Any:
        name, originals = func._schema.name, dict[int, tuple[Tensor, Tensor]]()
        if name == "aten::_local_scalar_dense":
            return 0.0 if flat[0].dtype.is_floating_point else 0
        args, kwargs = tree_unflatten(list(flat), spec)
        if (written := _written(func, args, kwargs)) is not None:
            returned = len(func._schema.returns)
            return None if not returned else written[0] if returned == 1 else tuple(written)
        args, kwargs = tree_unflatten([_moved(x, torch.device("meta"), _as_meta, originals) for x in flat], spec)
        kwargs.pop("pin_memory", None)
        result = SHAPED.get(name, func)(*args, **kwargs)

        def allocated(made: Tensor) -> Tensor:
            return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device)

        return tree_map(lambda x: _back(x, originals, allocated, device), result)


@functools.cache
def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")  # pyright: ignore


def _is_plain(kind: Any) -> bool:
    own = getattr(kind, "__torch_dispatch__", None)
    disabled = torch._C._disabled_torch_dispatch_impl  # pyright: ignore
    return kind in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or own is None or own is disabled


def _device_of(flat: Sequence[Any]) -> torch.device | None:
    """The device of what an operator returns, if it is about a GPU; it may be the CPU then."""
    asked = next((x for x in flat if isinstance(x, torch.device)), None)
    gpus = [x.device for x in flat if isinstance(x, Tensor) and x.is_cuda]
    if (not gpus and (asked is None or asked.type != "cuda")) or (asked is not None and asked.type == "meta"):
        return None
    device = gpus[0] if asked is None else asked
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_devices(name: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError for tensors of several devices, as CUDA does."""
    gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    if len(gpus) > 1 and name not in _COPIES:
        raise RuntimeError(f"{name}: tensors are on several GPUs: {sorted(map(str, gpus))}")
    if gpus and name not in _MIXES_DEVICES and any(not x.is_cuda and x.dim() > 0 for x in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found the CPU and {gpus}")


def _moved(
    value: Any, to: torch.device, change: Callable[[Tensor], Tensor], originals: dict[int, tuple[Tensor, Tensor]]
) -> Any:
    """An argument for another device. `originals` has each tensor that was changed, and what became of it."""
    if isinstance(value, Tensor) and (value.is_cuda or to.type == "meta"):
        changed = change(value)
        originals[id(changed)] = (value, changed)
        return changed
    if isinstance(value, torch.device) and (value.type == "cuda" or to.type == "meta"):
        return to
    if isinstance(value, torch.Generator) and (value.device.type == "cuda" or to.type == "meta"):
        return None
    return value


def _back(value: Any, originals: Any, made: Callable[[Tensor], Tensor], device: torch.device) -> Any:
    """What an operator returned: an argument of it, or a new tensor on `device`."""
    if not isinstance(value, Tensor):
        return value
    if id(value) in originals:
        return originals[id(value)][0]
    return value if device.type == "cpu" and value.device == device else made(value)


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _by_definition(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operator, by its definition in other operators where the CPU has no kernel."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if func not in decomposition_table:
            raise
        return decomposition_table[func](*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The arguments that an operator writes to; None if there are none."""
    names = [a.name for a in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [values[name] for name in written] if written else None


def install(*, computes: bool) -> None:
    """Computes so in this thread and in all that are started from now on. Gloo stands in for NCCL."""
    if not torch.cuda.is_available():  # a process may hide all GPUs from itself
        return
    PretendedGPU(computes=computes).__enter__()
    run = threading.Thread.run

    @functools.wraps(run)
    def run_computed(self: threading.Thread) -> None:
        with PretendedGPU(computes=computes):
            run(self)

    threading.Thread.run = run_computed
    _replace_nccl(fake=not computes)
    _fork_ranks()
    if not computes:
        _start_no_kernels()
    _switch_compilers_off(computes=computes)


def _replace_nccl(*, fake: bool) -> None:
    start = dist.init_process_group

    @functools.wraps(start)
    def started(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if fake:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
            return start("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return start(_without_nccl(backend), *args, **kwargs)

    make = dist.new_group

    @functools.wraps(make)
    def made(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return make(*args, backend=_without_nccl(backend), **kwargs)

    dist.init_process_group, dist.new_group = started, made  # pyright: ignore[reportAttributeAccessIssue]


def _fork_ranks() -> None:
    """Forks the ranks of an engine from a server that has imported all engines once, which CUDA itself forbids."""
    start = torch.multiprocessing.start_processes

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        from trainer.engines.contract.plain_ranks import preloaded_forkserver

        return start(*args, **{**kwargs, "start_method": preloaded_forkserver().get_start_method()})

    torch.multiprocessing.start_processes = started  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda._is_in_bad_fork = lambda: False  # pyright: ignore


def _start_no_kernels() -> None:
    """Kernels of Triton, such as fla's, leave the memory that was allocated for their results as it is."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, Autotuner, Heuristics):
        kind.run = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]


def _without_nccl(backend: Any) -> Any:
    return backend.replace("nccl", "gloo") if isinstance(backend, str) else backend


def _switch_compilers_off(*, computes: bool) -> None:
    """A compiled function would leave out the mode. FlexAttention has only a compiled kernel; its definition runs.

    Where nothing is computed, a compiled function allocates what it returns, as its one kernel does.
    """

    def uncompiled(function: Any = None, **_: Any) -> Any:
        if function is None:
            return uncompiled
        return function if computes else functools.wraps(function)(functools.partial(_returns_alone, function))

    torch.compile = uncompiled  # pyright: ignore[reportAttributeAccessIssue]
    AfterImport("torchtitan.models.common.attention", _replace_flex_attention)


def _returns_alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allocates what a function returns, and nothing on the way."""
    flat, spec = tree_flatten((args, kwargs))
    device = next(x.device for x in flat if isinstance(x, Tensor))
    shaped = [_as_meta(x) if isinstance(x, Tensor) else x for x in flat]
    args, kwargs = tree_unflatten(shaped, spec)
    result = function(*args, **kwargs)
    return tree_map(lambda x: torch.empty_like(x, device=device) if isinstance(x, Tensor) else x, result)


def _replace_flex_attention(attention: Any) -> None:
    """In torchtitan's module."""
    attention.flex_attention = flex_attention
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex_attention)
