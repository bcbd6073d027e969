"""Megatron-core's decoder layers with six changes, made through its specs.

* The rows of the fused projection of queries, keys and values are all queries, then all keys, then all values of a
  rank, where Megatron-core interleaves them by group of heads. So each projection of the Hugging Face model is a slice
  of the fused weight, and nothing is copied on load, push or export.
* Attention keeps the documents of a packed row apart, works on a CPU, and knows context parallelism, for which
  Megatron-core needs TransformerEngine.
* The router stays on its device; Megatron-core's own moves to CUDA. It can replay the experts of each token of a row.
* Matrix products exchange shards of the tokens on any device, for sequence parallelism.
* Norms are PyTorch's. Megatron-core's choice depends on what is installed, and without TransformerEngine it refuses
  sequence parallelism.

With sequence parallelism (arXiv 2205.05198) a tensor-parallel rank holds a shard of the tokens between matrix products:
an equal part of the row, in the order of the ranks. Megatron-core's own exchange of shards allocates on CUDA only.

Legend: L tokens of a row, T ranks, D and E sizes of a vector.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from ownloop_megatron.mcore import core_api
from rl.data.packing import Document
from rl.system.decoders import DecoderConfig
from trainer.engines.pytorch.context_parallel import ContextMasks, RowShard, attend_in_context, context_masks
from trainer.engines.pytorch.document_attention import document_attention, plan_row
from trainer.engines.pytorch.row_runner import of_layer


class SplitAttention(core_api.SelfAttention):
    """Self-attention whose fused projection holds queries, keys and values one after the other."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[L, 1, D] hidden states -> queries [L, 1, heads, size], keys and values [L, 1, groups, size] of this rank."""
        size = self.hidden_size_per_attention_head
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        fused, _bias = self.linear_qkv(hidden_states)
        query, key, value = (
            part.unflatten(-1, (-1, size)) for part in fused.split([heads * size, groups * size, groups * size], dim=-1)
        )
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


class ShardPlan(NamedTuple):
    """What `RowAttention` needs to know about a rank's shard of a row."""

    masks: ContextMasks
    group: dist.ProcessGroup
    """The ranks that compute the row together."""


class RowAttention(nn.Module):
    """Causal attention within each document of a packed row, or of this rank's shard of one."""

    def __init__(self, *, softmax_scale: float | None, **_: object) -> None:
        """Called by Megatron-core, with more than is needed here."""
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: object) -> Tensor:
        """[L, 1, heads, size] queries -> [L, 1, heads * size]. The mask is what a function below planned."""
        if isinstance(attention_mask, ShardPlan):
            return attend_in_group(query, key, value, attention_mask, self._scale)
        if query.device.type == "cpu":
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return document_attention(q, k, v, attention_mask, scale=self._scale).transpose(0, 1).flatten(2)
        return attend_by_kernel(query, key, value, attention_mask, self._scale)


class Norm(nn.RMSNorm):
    """PyTorch's norm as Megatron-core builds norms."""

    def __init__(self, config: object, hidden_size: int, eps: float) -> None:
        """Called by Megatron-core."""
        del config
        super().__init__(hidden_size, eps=eps)


class Router(core_api.TopKRouter):
    """A router that is not moved to CUDA. Like transformers, it computes in the dtype of the model by default."""

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - Megatron-core's name
        """[.., D] -> [.., experts] scores before the softmax."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype))


class RoutedLayer(core_api.TransformerLayer):
    """A layer whose router replays the experts that come with attention's plan, in place of Megatron-core's registry.

    That registry serves all models of a process, and in a pipeline it would replay another row's experts.
    """

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Does what Megatron-core's layer does; `attention_mask` may be a `RoutedPlan`."""
        # layers count from 1 there
        kwargs["attention_mask"], experts = of_layer(kwargs["attention_mask"], self.layer_number - 1)
        if experts is not None and self.config.sequence_parallel:
            group = self.mlp.router.tp_group
            experts = experts.chunk(group.size())[group.rank()]
        # None switches the replay off again
        self.mlp.router.router_replay = None if experts is None else _Replay(experts)
        return super().forward(*args, **kwargs)


class _Replay(NamedTuple):
    """What Megatron-core asks for the experts of each token."""

    experts: Tensor
    """[L, k] int64"""

    def get_replay_topk(self, scores: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """[L, experts] scores -> the scores of each token's own experts [L, k], and these experts."""
        return scores.gather(1, self.experts), self.experts


def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """As `RowAttention`, by PyTorch's kernel, one document of `lengths` tokens after the other; for GPUs."""
    q, k, v = (x.permute(1, 2, 0, 3).split(lengths, dim=2) for x in (query, key, value))
    parts = [
        F.scaled_dot_product_attention(*each, is_causal=True, scale=scale, enable_gqa=True)
        for each in zip(q, k, v, strict=True)
    ]
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(2)


def attend_in_group(query: Tensor, key: Tensor, value: Tensor, plan: ShardPlan, scale: float | None) -> Tensor:
    """As `RowAttention`, for a shard of a row, with the keys and values of all ranks of the group."""
    both = gather_tokens(torch.cat([key, value], dim=2), plan.group, sums_gradients=True).transpose(0, 1)
    k, v = both.chunk(2, dim=2)
    return attend_in_context(query.transpose(0, 1), k, v, plan.masks, scale=scale).transpose(0, 1).flatten(2)


def plan_shard(documents: tuple[Document, ...], shard: RowShard, group: dist.ProcessGroup) -> ShardPlan:
    """As `plan_documents`, for this rank's shard of a row that the ranks of `group` compute together."""
    return ShardPlan(context_masks(documents, shard), group)


def plan_documents(documents: tuple[Document, ...], device: torch.device) -> Any:
    """What `RowAttention` needs to know about a row, once for all layers."""
    # a kernel needs lengths alone
    return plan_row(documents) if device.type == "cpu" else [document.num_tokens for document in documents]


def decoder_spec(decoder: DecoderConfig, num_layers: int) -> Any:
    """The spec of a stage of `num_layers`: Megatron-core's own, without TransformerEngine, with the changes above."""
    qk_norm = decoder.family in ("qwen3", "qwen3_moe")
    spec = core_api.layer_spec(
        num_experts=None if decoder.moe is None else decoder.moe.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention.module = SplitAttention
    attention.submodules.core_attention = RowAttention
    attention.submodules.linear_qkv, attention.submodules.linear_proj = ColumnLinear, RowLinear
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    if decoder.moe is None:
        layer.mlp.submodules.linear_fc1, layer.mlp.submodules.linear_fc2 = ColumnLinear, RowLinear
    else:
        layer.mlp.submodules.router = Router
        spec.module = RoutedLayer
    return core_api.TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=Norm)


class ColumnLinear(core_api.ColumnParallelLinear):
    """Takes a shard of the tokens and returns this rank's columns of the product for all of them."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # noqa: A002 - Megatron-core's
        if not options["sequence_parallel"]:
            return super()._forward_impl(input, weight, **options)
        output: Tensor = _GatheredProduct.apply(input, weight, self.tp_group)
        return output if options["bias"] is None else output + options["bias"]


class RowLinear(core_api.RowParallelLinear):
    """Takes this rank's columns of all tokens and returns the product, summed over ranks, for its shard of them."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[L, 1, D / T] -> [L / T, 1, E], and the bias, which the caller adds."""
        if not self.sequence_parallel:
            return super().forward(input_)
        output: Tensor = _ReduceScatter.apply(F.linear(input_, self.weight), self.tp_group)
        return output, self.bias


def split_tokens(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, ...], alike on all ranks -> [L / T, ...]. The gradient of the input is whole on every rank."""
    return core_api.copy_to_tensor_parallel_ranks(tokens, group).chunk(group.size())[group.rank()]


def gather_tokens(shard: Tensor, group: dist.ProcessGroup, *, sums_gradients: bool) -> Tensor:
    """[L / T, ...] -> [L, ...]. With `sums_gradients` each rank's gradient is a part of the sum, else it is the sum."""
    gathered: Tensor = _Gather.apply(shard, group, sums_gradients)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        return _all_gather(shard, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums_gradients:
            return _reduce_scatter(grads[0], ctx.group), None, None
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None, None


class _ReduceScatter(torch.autograd.Function):
    """[L, ...] -> [L / T, ...], this rank's shard of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grads[0], ctx.group), None


class _GatheredProduct(torch.autograd.Function):
    """[L / T, 1, D] -> [L, 1, E], the tokens of all ranks times this rank's weight [E, D].

    Only the shard is kept for the backward pass, which gathers the tokens again while it multiplies.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.group = group
        return F.linear(_all_gather(shard, group), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        tokens = shard.new_empty(len(grads[0]), *shard.shape[1:])
        gathering = dist.all_gather_single(tokens, shard.contiguous(), group=ctx.group, async_op=True)
        grad_tokens = grads[0] @ weight
        assert gathering is not None
        gathering.wait()
        grad_shard = torch.empty_like(shard)
        scattering = dist.reduce_scatter_single(grad_shard, grad_tokens, group=ctx.group, async_op=True)
        grad_weight = grads[0].flatten(0, 1).T @ tokens.flatten(0, 1)
        assert scattering is not None
        scattering.wait()
        return grad_shard, grad_weight, None


def _all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    dist.all_gather_single(whole, shard.contiguous(), group=group)
    return whole


def _reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = parts.new_empty(len(parts) // group.size(), *parts.shape[1:])
    dist.reduce_scatter_single(shard, parts.contiguous(), group=group)
    return shard
