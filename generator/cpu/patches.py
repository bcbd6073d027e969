"""Patches of vLLM, each with its reason and the condition for its removal. Written against vLLM 0.32.

Nothing is patched when this module is imported. The worker of a tensor-parallel group is in
`mesh_worker.py`, and the one that computes adapters in `grouped_lora.py`, because vLLM imports them by name.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as expert_method
import vllm.v1.sample.sampler as sampler
import vllm.v1.worker.gpu_model_runner as model_runner
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm import ir
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from generator.cpu.sampler import patch_sampling
from generator.cpu.weight_packing import patch_packing
from generator.options import CPU_KERNELS
from rl.system.hardware import has_amx


def patch_cpu() -> None:
    """Applies the patches for the CPU. Has to be called before an engine is built; calling it again does nothing."""
    sampler.batched_count_greater_than = _no_ranks
    if not isinstance(expert_method.select_unquantized_moe_backend, _ExpertsWithoutAdapters):
        select = expert_method.select_unquantized_moe_backend
        expert_method.select_unquantized_moe_backend = _ExpertsWithoutAdapters(select)
    CPUAttentionBackend.get_supported_kernel_block_sizes = _blocks_of_16
    _register_norms()
    if not has_amx():
        # Where oneDNN is kept from AMX by ONEDNN_MAX_CPU_ISA, vLLM still takes its kernels for AMX, which multiply with
        # oneDNN's and end the process. Remove when vLLM asks oneDNN.
        torch.cpu._is_amx_tile_supported = _no  # pyright: ignore[reportPrivateUsage]
    RotaryEmbedding.forward_cpu = _rotate
    patch_kv_cache()
    patch_packing()
    patch_sampling()
    # See `grouped_lora.py` for the reason and the condition for its removal.
    setattr(current_platform, "get_punica_wrapper", lambda: "generator.cpu.grouped_lora.GroupedLoRA")  # noqa: B010


@dataclass(frozen=True, slots=True)
class _ExpertsWithoutAdapters:
    """Has experts computed by the CPU's own kernels although the engine has room for adapters.

    vLLM then chooses Triton's kernels for all experts, adapted or not, and a CPU has no Triton: the first request would
    end the engine. Here no adapter adapts experts.

    Remove when vLLM chooses kernels for experts on the CPU without looking at adapters of other layers.
    """

    original: Callable[[FusedMoEConfig], object]

    def __call__(self, moe_config: FusedMoEConfig) -> object:
        return self.original(replace(moe_config, is_lora_enabled=False))


_rotate_halves = RotaryEmbedding.forward_cpu


def _rotate(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotates queries and keys; pairs of neighbours in PyTorch, as DeepSeek-V3 and GLM-4 have them.

    vLLM's kernel for pairs of neighbours is wrong for all heads but the first, without an error.

    Remove when `tests/generator/cpu/test_patches.py` passes without it.
    """
    rotate = _rotate_halves if self.is_neox_style else RotaryEmbedding.forward_native
    return rotate(self, positions, query, key)


def _no() -> bool:
    return False


@staticmethod
def _blocks_of_16(kv_cache_spec: object = None) -> list[int | MultipleOf]:
    """The sizes of blocks of keys and values that vLLM's attention on the CPU can do.

    vLLM names multiples of 32 only, but has a kernel for multiples of 16 ("vec16"), which it chooses by itself for such
    blocks; `options.cpu_block_size` says why they are wanted.

    Remove when vLLM's own list has them; `tests/generator/test_engine.py` fails then.
    """
    del kv_cache_spec
    return [MultipleOf(16)]


def _no_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replaces the rank of the sampled token among all tokens, which nothing here uses.

    vLLM computes it whenever log-probs are requested. It takes a pass over the whole vocabulary (7 % of the CPU time of
    a step with SmolLM2), and 2 to 10 s of compilation at the first request.

    Remove when vLLM can return log-probs without ranks.
    """
    del values
    return torch.zeros(logprobs.shape[0], dtype=torch.int64, device=logprobs.device)


def _register_norms() -> None:
    """Registers vLLM's own CPU kernels for RMSNorm under the name `CPU_KERNELS`, which `options` asks for.

    vLLM 0.32 has the kernels but uses them on GPUs only. On the CPU it runs seven PyTorch operators per norm, and a
    step of SmolLM2 has 61 norms. With ten of its layers, 32 sequences and float32, a step takes 104 ms of CPU time with
    the kernels and 110 ms without.

    Remove when `vllm_c` is supported on the CPU in `vllm/kernels/vllm_c.py`.
    """

    def can_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        del epsilon
        return variance_size is None and weight is not None and weight.dtype == x.dtype

    def can_add_and_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return can_norm(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()

    def norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        del variance_size
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    def add_and_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del variance_size
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    if CPU_KERNELS not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(CPU_KERNELS, supports_args=can_norm)(norm)
        ir.ops.fused_add_rms_norm.register_impl(CPU_KERNELS, supports_args=can_add_and_norm, inplace=True)(add_and_norm)


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

    def __call__(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        with _ZerosOfTheKernel():
            return self._original(*args, **kwargs)


class _ZerosOfTheKernel(TorchFunctionMode):
    """Within it, `torch.zeros(num_bytes, dtype=torch.int8, device=...)` on the CPU writes nothing."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[int] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        given = dict(kwargs or {})
        if func is not torch.zeros or given.get("dtype") != torch.int8 or torch.device(given["device"]).type != "cpu":
            return func(*args, **given)
        pages = mmap.mmap(-1, math.prod(args), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.int8)  # keeps `pages`
