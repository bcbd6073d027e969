"""Patches of vLLM that keep plain weights next to packed ones and pack them fast, with reasons and removal conditions.

oneDNN reads dozens of rows of a matrix side by side when it packs it. Main memory is slow at that, and where rows are a
multiple of 1 KB apart, as they are in most models, they have to share a few lines of the cache: packing takes three
times as long. Here a matrix is first copied, in one sweep, to rows that are an odd number of cache lines apart.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import vllm._custom_ops as ops
import vllm.model_executor.layers.utils as gemm
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rl.weights.version import WeightsError

_PACKS = "ownloop_packs_weight"
_OWN_PACKING = "ownloop_own_packing"
_LINE_BYTES = 64
_CONFLICT_BYTES = 1 << 10
# Larger matrices do not stay in the cache, so that a copy pays only where their rows would get into each other's way.
_CACHED_BYTES = 8 << 20
# Memory that a thread keeps at most. Larger matrices, such as the output projection of a large model, are packed from
# where they lie.
_SCRATCH_BYTES = 128 << 20


def patch_packing() -> None:
    """Applies the patches. Calling it again does nothing."""
    if not isinstance(gemm.dispatch_cpu_unquantized_gemm, _PackBesideWeight):
        gemm.dispatch_cpu_unquantized_gemm = _PackBesideWeight(gemm.dispatch_cpu_unquantized_gemm)
    if not isinstance(ops.create_onednn_mm, _PackFromCache):
        ops.create_onednn_mm = _PackFromCache(ops.create_onednn_mm)


class _Memory(threading.local):
    """The memory of one thread."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[torch.Size, torch.dtype], Tensor] = {}  # kept, because they take as long as a copy

    def like(self, weight: Tensor) -> Tensor:
        """Memory for a weight [K, N], the transpose of a matrix whose N rows are an odd number of cache lines apart."""
        view = self._views.get((weight.shape, weight.dtype))
        if view is None:
            width, num_rows = weight.shape
            num_lines = -(-width * weight.itemsize // _LINE_BYTES) | 1
            num_bytes = num_rows * num_lines * _LINE_BYTES
            with torch.inference_mode(False):  # what is made in that mode can be written to in no other
                if len(self._bytes) < num_bytes:
                    self._views.clear()
                    self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
                view = self._bytes[:num_bytes].view(weight.dtype).view(num_rows, -1)[:, :width].t()
            self._views[weight.shape, weight.dtype] = view
        return view


@dataclass(frozen=True, slots=True)
class _PackFromCache:
    """`create_onednn_mm`, which makes a packed copy of a matrix.

    Remove when `python -m benchmarks.weight_growth`, whose rows are multiples of 512 bytes, is as fast without it.
    """

    original: Callable[..., object]
    memory: _Memory = field(default_factory=_Memory)

    def __call__(self, weight: Tensor, *arguments: object, **options: object) -> object:
        """`weight` [K, N] is the transposed view of a matrix with N rows."""
        row_bytes = weight.stride(1) * weight.itemsize
        limit = _CACHED_BYTES if row_bytes % _CONFLICT_BYTES else _SCRATCH_BYTES
        if weight.stride(0) == 1 and row_bytes * weight.shape[1] <= limit:
            weight = self.memory.like(weight).copy_(weight)
        return self.original(weight, *arguments, **options)


@dataclass(frozen=True, slots=True)
class _PackBesideWeight:
    """Keeps the plain weight next to its packed copy (for oneDNN or AMX), so that `load_weights` can load into it.

    vLLM throws the plain weight away; `load_weights` then fails, and `reload_weights` silently keeps the old head of a
    model with tied embeddings. Packed weights are worth their memory and the time of packing at every pull: 1,000
    tokens take 2.3 s of CPU time with packed weights of 135M parameters, and 2.8 s with plain ones. Not packed are a
    weight that vLLM does not multiply with (`_multiplies`) and a dtype that oneDNN cannot multiply on this processor
    (bfloat16 without AVX-512).

    Nothing is packed before it is multiplied with. A run's first pull, which comes before its first step, packs all.

    Remove when vLLM's `reload_weights` is right for tied embeddings on the CPU and as fast.
    """

    original: Callable[..., None]

    def __call__(self, layer: nn.Module, remove_weight: bool) -> None:
        weight = cast(Tensor, layer.weight)
        if weight.ndim != 2:
            self.original(layer, remove_weight)  # `packed_in_place` packs experts and convolutions again
            return
        if not _multiplies(layer, weight.dtype):
            object.__setattr__(layer, "cpu_linear", nn.functional.linear)
            return
        if weight.is_meta or not self._packs(weight.dtype):
            self.pack(layer, weight)
            return

        def pack_and_multiply(*inputs: Tensor | None) -> Tensor:
            self.pack(layer, cast(Tensor, layer.weight))
            return cast(Callable[..., Tensor], layer.cpu_linear)(*inputs)

        object.__setattr__(layer, "cpu_linear", pack_and_multiply)
        object.__setattr__(layer, _PACKS, True)

    def _packs(self, dtype: torch.dtype) -> bool:
        """Whether this processor packs matrices of a dtype."""
        sample = nn.Module()
        self.pack(sample, torch.zeros(64, 64, dtype=dtype))
        return bool(vars(sample)[_PACKS])

    def pack(self, layer: nn.Module, weight: Tensor) -> None:
        """Makes `layer` multiply with a packed copy of `weight`, or with its own weight if there is no packed form.

        With AMX, vLLM turns the bias of a packed layer to float32 and replaces the layer's own. Here the layer
        keeps its own, which the next pull loads into, and multiplies with a copy.
        """
        if (own := vars(layer).get(_OWN_PACKING)) is not None:
            object.__setattr__(layer, "cpu_linear", own(weight))
            return
        bias = cast(Tensor | None, getattr(layer, "bias", None))
        stand_in = SimpleNamespace(weight=weight, bias=None if bias is None else bias.detach())
        self.original(stand_in, remove_weight=True)
        if not hasattr(stand_in, "cpu_linear"):
            return
        packs = stand_in.weight is not weight  # vLLM replaces a weight that it has packed
        multiply = stand_in.cpu_linear if packs else nn.functional.linear
        if bias is not None and stand_in.bias.dtype != bias.dtype:
            multiply = _WithBias(multiply, stand_in.bias)
        object.__setattr__(layer, "cpu_linear", multiply)
        object.__setattr__(layer, _PACKS, packs)


@dataclass(frozen=True, slots=True)
class _WithBias:
    """A product that adds its own copy of the layer's bias, where the layer adds one at all."""

    multiply: Callable[..., Tensor]
    bias: Tensor

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply(x, weight, None if bias is None else self.bias)


def _multiplies(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether vLLM multiplies with the packed weight of a layer, if there is one.

    It only looks rows of input embeddings up, and an output projection in another dtype than the model's
    (`head_dtype` of the model's configuration) casts the plain weight in every step.
    """
    if not isinstance(layer, VocabParallelEmbedding):
        return True
    return isinstance(layer, ParallelLMHead) and get_current_vllm_config().model_config.head_dtype == dtype


def packed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that multiply with a packed copy of their weight. Empty on a GPU."""
    return [layer for layer in model.modules() if vars(layer).get(_PACKS)]


def pack(layer: nn.Module, weight: Tensor) -> None:
    """Makes a packed layer multiply with `weight` from now on. Threads may pack several layers at a time."""
    object.__setattr__(layer, "cpu_linear", None)  # frees the old packed copy, whose memory the new one then takes
    assert isinstance(gemm.dispatch_cpu_unquantized_gemm, _PackBesideWeight)
    gemm.dispatch_cpu_unquantized_gemm.pack(layer, weight)


def multiply_by(layer: nn.Module, packing: Callable[[Tensor], Callable[..., Tensor]]) -> None:
    """Makes a layer multiply by what `packing` returns for its weight, a function of (x, weight, bias), at each pull.

    Does nothing for a layer that vLLM does not multiply with.
    """
    weight = cast(Tensor, layer.weight)
    if "cpu_linear" in vars(layer) and weight.ndim == 2 and _multiplies(layer, weight.dtype):
        object.__setattr__(layer, _OWN_PACKING, packing)
        object.__setattr__(layer, _PACKS, True)
        pack(layer, weight)


def pack_again(layer: nn.Module, weight: Tensor) -> None:
    """`pack` for a layer that has been packed before, whose plain weight may be out of date.

    Raises `WeightsError` if it cannot be packed: vLLM only warns of this, and would multiply with the plain weight.
    """
    pack(layer, weight)
    if not vars(layer)[_PACKS]:
        shape = "x".join(map(str, weight.shape))
        raise WeightsError(f"vLLM could not pack a weight of {shape} again; the generator's log says why")


@contextlib.contextmanager
def plain_convolutions(model: nn.Module) -> Generator[None]:
    """Within the block, convolutions that vLLM has packed in place have the shape that `load_weights` loads into.

    Remove when `load_weights` packs convolutions on the CPU; vLLM packs them once, so a second load leaves garbage.
    """
    packed = [(layer.weight, layer.weight.shape) for layer in _packed_convolutions(model)]
    for weight, shape in packed:
        weight.data = weight.data.view(shape[0], 1, -1)
    try:
        yield
    finally:
        for weight, shape in packed:
            weight.data = weight.data.view(shape)


def _packed_convolutions(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "_cpu_unpacked_conv_weight")]


def _pack_convolution(layer: Any) -> None:
    plain = layer._cpu_unpacked_conv_weight  # vLLM computes with this one as well
    plain.copy_(layer.weight.data.view_as(plain))
    packed: Tensor = ops.causal_conv1d_weight_pack(plain)
    layer.weight.data.copy_(packed.view_as(layer.weight))


def absorbing(model: nn.Module) -> list[MLAAttention]:
    """The layers that compute with parts of the plain weight of `kv_b_proj`, their parameters `W_UV` and `W_UK_T`."""
    return [layer for layer in model.modules() if isinstance(layer, MLAAttention)]


def packed_in_place(model: nn.Module) -> list[Callable[[], None]]:
    """For each layer whose weights vLLM has changed after loading them, a function that does so again.

    On the CPU experts and convolutions are packed in place. Everywhere, latent attention (MLA) computes with parts of
    `kv_b_proj`, which may be copies: without this, decoding would use an earlier version of them.

    Raises ValueError for experts that vLLM widens when it packs them: nothing can be loaded into these.

    Remove when `load_weights` packs experts on the CPU; vLLM packs them once, so a second load leaves garbage.
    """
    packing: list[Callable[[], None]] = [partial(_pack_convolution, layer) for layer in _packed_convolutions(model)]
    packing += [
        partial(each.process_weights_after_loading, next(each.kv_b_proj.parameters()).dtype)
        for each in absorbing(model)
    ]
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
