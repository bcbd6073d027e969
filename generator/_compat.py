"""Patches of vLLM, each with its reason and the condition for its removal. Written against vLLM 0.32.

Nothing is patched when this module is imported. The worker that a tensor-parallel group needs on the CPU is in
`_cpu_worker.py`, because vLLM imports it by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as expert_method
import vllm.v1.sample.sampler as sampler
from torch import nn
from vllm import ir
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from generator._cpu_kv_cache import patch_kv_cache
from generator._cpu_packing import patch_packing
from generator._cpu_sampling import patch_sampling
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
    patch_kv_cache()
    patch_packing()
    patch_sampling()
    # See `_cpu_lora.py` for the reason and the condition for its removal.
    setattr(current_platform, "get_punica_wrapper", lambda: "generator._cpu_lora.GroupedLoRA")  # noqa: B010


def patch_prompt_logprobs(runner: Any) -> None:
    """Has a model runner score every prompt with the adapter of its own request.

    vLLM computes the logits of prompts while its kernels still have the adapters of the step's samples, row by row. An
    adapter of the output projection is then missing from its own prompts, and added to those of others.

    Remove when `tests/generator/test_prompt_logprobs.py` passes without it.
    """
    original: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict

    def one_by_one(hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> dict[str, Any]:
        wanted: dict[str, int] = runner.num_prompt_logprobs
        scored: dict[str, Any] = {}
        try:
            # Ranks gather logits together, so all take requests in one order: that in which they were scheduled.
            for name in [name for name in wanted if name in num_scheduled_tokens]:
                request = runner.requests[name]
                remaining = len(request.prompt_token_ids or ()) - request.num_computed_tokens - 1
                num_rows = min(num_scheduled_tokens[name], remaining)
                if num_rows > 0:
                    lora = request.lora_request
                    rows = (lora.lora_int_id if lora else 0,) * num_rows
                    runner._set_active_loras(rows, rows, {lora} if lora else set())
                runner.num_prompt_logprobs = {name: wanted[name]}
                scored |= original(hidden_states, num_scheduled_tokens)
                if not runner.num_prompt_logprobs:  # this was its last part
                    del wanted[name]
        finally:
            runner.num_prompt_logprobs = wanted
        return scored

    runner._get_prompt_logprobs_dict = one_by_one


@dataclass(frozen=True, slots=True)
class _ExpertsWithoutAdapters:
    """Has experts computed by the CPU's own kernels although the engine has room for adapters.

    vLLM then chooses Triton's kernels for all experts, adapted or not, and a CPU has no Triton: the first request would
    end the engine. Here no adapter adapts experts.

    Remove when vLLM chooses kernels for experts on the CPU without looking at adapters of other layers.
    """

    original: Callable[[Any], Any]

    def __call__(self, moe_config: Any) -> Any:
        return self.original(replace(moe_config, is_lora_enabled=False))


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


def packed_experts(model: nn.Module) -> list[Callable[[], None]]:
    """For each layer of experts that vLLM packs in place on the CPU, a function that packs it again. Empty on a GPU.

    Raises ValueError for experts that vLLM widens when it packs them, because nothing can be loaded into those.

    Remove when `load_weights` packs experts on the CPU; vLLM packs them once, so a second load leaves garbage.
    """
    packing: list[Callable[[], None]] = []
    layer: Any  # vLLM declares no types for these attributes
    for layer in model.modules():
        experts: Any = getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts):
            continue
        unchecked: Any = experts
        width, padded = layer.moe_config.intermediate_size_per_partition, layer.w13_weight.shape[1] // 2
        if width != padded:
            raise ValueError(
                f"each rank holds {width} of moe_intermediate_size's columns; on the CPU it has to be a multiple of"
                f" {experts.output_alignment}, or weights cannot be pulled"
            )
        if not unchecked._use_zentorch:
            packing.append(partial(_pack_experts, layer, experts.isa))
    return packing


def _pack_experts(layer: Any, isa: str) -> None:
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data.copy_(cpu_prepack_moe_weight(weight.data, isa))
