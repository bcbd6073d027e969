"""Has one vLLM engine compute by the kernels. Written against vLLM 0.32. `generator_gpu.py` has what differs on GPUs.

Everything is set on the engine's own objects, so that other engines of the process compute as before: the products of
its layers, norms, activations, rotations, attention with its cache of keys and values, and the sampler's log-softmax,
temperature and cut. Scheduler, prefix cache, sampling and pulls are vLLM's and the core's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.engine.llm_engine import LLMEngine

from generator.cpu.weight_packing import multiply_by
from ownloop_bitwise import ops, sampling
from ownloop_bitwise.adapters import BitwiseAdapters
from ownloop_bitwise.draws import draw_by_position
from ownloop_bitwise.operands import rope_table
from ownloop_bitwise.shape import BitwiseDecoder, inverse_frequencies

_PLAN = "ownloop_sequences"
_FORWARD = "_forward_method"  # what vLLM has chosen for a layer of several implementations


def compute_bitwise(engine: LLMEngine, shape: BitwiseDecoder) -> None:
    """Changes a new engine of a model of this shape. Raises ValueError for a layer that has no kernel."""
    worker: Any = engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    settings = engine.model_config
    num_positions = max(settings.max_model_len, shape.max_seq_len)
    on_cpu = runner.device.type == "cpu"
    with set_current_vllm_config(engine.vllm_config):
        for name, layer in list(runner.model.named_modules()):
            _change(name, layer, shape, num_positions, runner.device)
        if shape.family == "gemma2" and on_cpu:
            _add_head(runner.model, runner.model.model.embed_tokens)
    if shape.logit_cap is not None:
        _cap_logits(runner.model, shape.logit_cap)
    if not on_cpu:
        from ownloop_bitwise.generator_gpu import change_sampler

        change_sampler(runner.sampler)
        return
    if engine.vllm_config.lora_config is not None:
        BitwiseAdapters(runner.lora_manager._adapter_manager)
    sampler = runner.sampler
    sampler.compute_logprobs = sampling.log_softmax
    sampler.apply_temperature = sampling.apply_temperature
    sampler.topk_topp_sampler.cut = sampling.cut
    sampler.topk_topp_sampler.log_softmax = sampling.log_softmax_
    draw_by_position(runner)


def _change(name: str, layer: nn.Module, shape: BitwiseDecoder, num_positions: int, device: torch.device) -> None:
    """Has one layer of the model compute by the kernels."""
    if type(layer) is RMSNorm:
        setattr(layer, _FORWARD, partial(_norm, layer, 0.0))
    elif type(layer) is GemmaRMSNorm:
        setattr(layer, _FORWARD, partial(_norm, layer, 1.0))
    elif type(layer) is SiluAndMul:
        setattr(layer, _FORWARD, partial(_gate_and_mul, gelu=False))
    elif type(layer) is GeluAndMul and layer.approximate == "tanh":
        setattr(layer, _FORWARD, partial(_gate_and_mul, gelu=True))
    elif isinstance(layer, Attention):
        number = extract_layer_index(name)
        change: Any = _change_attention
        if device.type != "cpu":
            from ownloop_bitwise.generator_gpu import change_attention as change
        change(name, layer, shape.windows[number] if shape.windows else 0, shape.attention_cap)
    elif isinstance(rotary := getattr(layer, "rotary_emb", None), RotaryEmbedding):
        table = rope_table(inverse_frequencies(shape, extract_layer_index(name)), num_positions, device)
        # Engines of a process share vLLM's.
        layer.rotary_emb = _Rotary(rotary, table, shape.row.rotates == "neighbours")
    elif device.type == "cpu" and isinstance(getattr(layer, "weight", None), Tensor):
        multiply_by(layer, _packing)


def _packing(weight: Tensor) -> Callable[..., Tensor]:
    packed = ops.Packed.of(weight)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        del weight
        return ops.product(x, packed, bias)

    return multiply


def _norm(
    layer: RMSNorm | GemmaRMSNorm, shift: float, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of x, or of its sum with a residual, which is rounded first as the trainer's is."""
    if residual is None:
        return ops.rms_norm(x, layer.weight.data, layer.variance_epsilon, shift)
    whole = x + residual
    return ops.rms_norm(whole, layer.weight.data, layer.variance_epsilon, shift), whole


def _gate_and_mul(x: Tensor, *, gelu: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ops.gate_mul(gate, up, gelu=gelu)


class _Rotary(nn.Module):
    """Rotary embeddings from the table that the trainer has. vLLM rounds its own to bfloat16."""

    def __init__(self, rotary: RotaryEmbedding, table: Tensor, neighbours: bool) -> None:
        """Raises ValueError if vLLM would rotate other dimensions than the trainer does."""
        super().__init__()
        if not rotary.rotary_dim == rotary.head_size == table.shape[1] or rotary.is_neox_style == neighbours:
            raise ValueError("numerics is 'bitwise', and vLLM rotates other dimensions of a head than the trainer")
        self._table, self._neighbours = table, neighbours

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[L, heads * head_size] each, or [L, heads, head_size], at positions [L]."""
        return self._rotated(query, positions), self._rotated(key, positions)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = x if x.ndim == 3 else x.unflatten(-1, (-1, self._table.shape[1]))
        return ops.rotate(heads, self._table, positions, neighbours=self._neighbours).view(x.shape)


def _change_attention(name: str, layer: Attention, window: int, cap: float) -> None:
    implementation = layer.impl
    known = isinstance(implementation, CPUAttentionBackendImpl)
    if (
        not known
        or implementation.sliding_window != (window or -1)
        or implementation.logits_soft_cap != cap
        or implementation.sinks is not None
    ):
        raise ValueError(f"numerics is 'bitwise', which has no kernel for the attention of {name}")
    implementation.do_kv_cache_update = _write_cache
    implementation.forward = partial(_attend, implementation, window, cap)


class _Head(nn.Module):
    """The output projection of a model that has no layer for it, and multiplies with its embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        """Shares the weight."""
        super().__init__()
        self.weight = embedding.weight
        object.__setattr__(self, "cpu_linear", None)  # as vLLM has it in layers that it multiplies with

    def multiply(self, *inputs: Tensor | None) -> Tensor:
        """By the newest packed weight."""
        return vars(self)["cpu_linear"](*inputs)


def _add_head(model: nn.Module, embedding: nn.Module) -> None:
    """Adds a layer for the output projection, so that pulls pack it, and leave the embedding as it is."""
    head = _Head(embedding)
    model.add_module("bitwise_head", head)
    multiply_by(head, _packing)
    object.__setattr__(embedding, "cpu_linear", head.multiply)


def _cap_logits(model: Any, cap: float) -> None:
    """Caps the logits by the kernel."""
    processor, compute = model.logits_processor, model.compute_logits
    getattr(processor, "base_layer", processor).soft_cap = None
    model.compute_logits = lambda *args, **kwargs: ops.soft_cap(compute(*args, **kwargs), cap)


def _rows(kv_cache: Tensor) -> Tensor:
    """The cache [blocks, groups, size, 2 * D] as rows [blocks * size, groups, 2 * D], in an order of its own."""
    blocks, groups, size, width = kv_cache.shape
    assert kv_cache.is_contiguous()
    return kv_cache.view(blocks * size, groups, width)


def _write_cache(layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores keys and values [L, groups, D] of the tokens at these slots."""
    del layer
    rows, dim, slots = _rows(kv_cache), key.shape[-1], slot_mapping
    rows[slots, :, :dim] = key[: len(slots)]
    rows[slots, :, dim:] = value[: len(slots)]


def _attend(
    implementation: CPUAttentionBackendImpl,
    window: int,
    cap: float,
    layer: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    """As the method that it replaces: fills and returns `output` [L, heads, D], or [L, heads * D]."""
    del layer, key, value, output_scale, output_block_scale
    if attn_metadata is None:  # while vLLM warms up
        return output
    plan = vars(attn_metadata).get(_PLAN)
    if plan is None:  # the layers of a step share it
        plan = ops.Sequences.of_pages(
            attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table, kv_cache.shape[2]
        )
        setattr(attn_metadata, _PLAN, plan)
    rows, length, dim = _rows(kv_cache), attn_metadata.num_actual_tokens, implementation.head_size
    queries = query[:length].reshape(length, -1, dim)
    attended = ops.attend(queries, rows[..., :dim], rows[..., dim:], plan, implementation.scale, window, cap)
    output[:length].copy_(attended.view(output[:length].shape))
    return output
