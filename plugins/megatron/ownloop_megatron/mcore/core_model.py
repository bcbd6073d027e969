"""Builds this rank's stages of a Megatron-core model and the table of its parameters.

A `Stage` is a policy or a critic: the forward pass of the last one ends in log-probs or in values. Under expert
parallelism `RaggedDispatcher` gathers all tokens of a group, whose ranks have rows of different lengths, and each rank
computes its experts. Megatron-core's own gather wants equally many tokens on every rank and CUDA; this one pads, and
works on any device.

Legend: N most tokens of any rank, R ranks of the group, D size of a vector.
"""

import warnings
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ownloop_megatron.mcore import core_api
from ownloop_megatron.mcore.groups import RankGroups
from ownloop_megatron.mcore.layers import SplitAttention, decoder_spec, gather_tokens, split_tokens
from ownloop_megatron.mcore.layout_check import MODEL_PROVIDER
from ownloop_megatron.mcore.names import Piece, pieces_of
from rl.system.decoders import DecoderConfig
from rl.types import Head
from trainer.config import TrainerConfig
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.hf_directory import inverse_frequencies
from trainer.engines.pytorch.logprobs import logprobs_and_entropy, values
from trainer.engines.pytorch.ranks import DTYPES

_PORTABLE: Mapping[str, object] = {
    # The weights come from files, on whichever device.
    "use_cpu_initialization": True,
    "perform_initialization": False,
    # These need Apex, TransformerEngine or CUDA.
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}


class Stage(nn.Module):
    """The whole model, or the layers of one pipeline stage. Legend: L tokens of a row, D model dimension."""

    def __init__(
        self, model: Any, decoder: DecoderConfig, head: Head, tensor_group: dist.ProcessGroup, *, splits_tokens: bool
    ) -> None:
        """`model` is a GPTModel, on the meta device. A value head replaces its output projection.

        With `splits_tokens` a tensor-parallel rank holds a shard of the hidden states; see `layers.py`.
        """
        super().__init__()
        if head == "value" and model.post_process:
            model.output_layer = nn.Linear(decoder.dim, 1, bias=False, device="meta", dtype=model.config.params_dtype)
        self.model = model
        self._head = head
        self._config = decoder
        self._group = tensor_group
        self._is_sharded = dist.get_world_size(tensor_group) > 1
        self._splits_tokens = splits_tokens
        self._frequencies: Tensor | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        plan: object,
        *,
        scored: Tensor,
        targets: Tensor,
        entropy: bool,
        distribution: Distribution,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Scores the positions `scored` [S] of one packed row: tokens and positions [1, L], targets [S].

        Returns log-probs [S] float32 and entropies [S] float32 if asked for. Only scored positions go through the
        output projection. A value head returns values [S] float32 and None. In a pipeline, every stage but the first
        takes hidden states [1, L, D] instead of tokens, and every stage but the last returns them; only a shard of L of
        them where the tokens are split.
        """
        embedded: Tensor | None = None
        if self.model.pre_process:
            whole: Tensor = self.model.embedding(input_ids=tokens, position_ids=None)
            embedded = split_tokens(whole, self._group) if self._splits_tokens else whole
        else:
            self.model.set_input_tensor(tokens.transpose(0, 1))
        hidden: Tensor = self.model.decoder(
            hidden_states=embedded, attention_mask=plan, rotary_pos_emb=self._angles(positions)
        )
        if not self.model.post_process:
            return hidden.transpose(0, 1)
        hidden = hidden.squeeze(1)
        # A rank's gradient of the hidden states is that of its part of the vocabulary, but a value head is not sharded.
        if self._splits_tokens:
            hidden = gather_tokens(hidden, self._group, sums_gradients=self._head == "lm")
        hidden = hidden.index_select(0, scored)
        if self._head == "value":
            return values(hidden, self.model.output_layer.weight), None
        if self._is_sharded and not self._splits_tokens:
            hidden = core_api.copy_to_tensor_parallel_ranks(hidden, self._group)
        weight = (
            self.model.shared_embedding_or_output_weight()
            if self._config.tie_embeddings
            else self.model.output_layer.weight
        )
        group = self._group if self._is_sharded else None
        return logprobs_and_entropy(hidden, weight, targets, entropy=entropy, group=group, distribution=distribution)

    def _angles(self, positions: Tensor) -> Tensor:
        """[1, L] positions -> [L, 1, 1, head_dim] angles, the form in which Megatron-core takes them."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self._config).to(positions.device)
        angles = torch.outer(positions[0].float(), self._frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class BuiltModel(NamedTuple):
    """This rank's part of a model, in the compute dtype, not loaded yet."""

    stages: Sequence[Stage]
    """The whole model as one stage, or this rank's pipeline stages in order."""
    named: Sequence[tuple[nn.Parameter, Sequence[Piece]]]
    """Every parameter with its pieces by Hugging Face name."""


def build_model(config: TrainerConfig, decoder: DecoderConfig, groups: RankGroups, device: torch.device) -> BuiltModel:
    """Builds the stages on the device, uninitialized."""
    # With sequence parallelism, Megatron-core asks for random states that exist on CUDA only. Nothing here is random.
    core_api.initialize_rng_tracker(inference_rng_tracker=True)
    core_config, collection = transformer_config(config, decoder), groups.collection()
    splits_tokens = config.num_token_shards > 1
    stages: list[Stage] = []
    named: list[tuple[nn.Parameter, Sequence[Piece]]] = []
    for index in stage_indices(config, groups.pipeline.get_local_rank()):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`sequence_parallel` is set to `True`")  # experts are not split
            model = _core_model(config, decoder, core_config, collection, index)
            stage = Stage(model, decoder, config.head, groups.tensor, splits_tokens=splits_tokens)
        stage.to_empty(device=device)
        first_expert = 0
        for layer in model.decoder.layers:
            if not isinstance(layer.self_attention, SplitAttention):
                raise ValueError(
                    f"engine_args[{MODEL_PROVIDER!r}] made a layer with {type(layer.self_attention).__name__}; "
                    "attention must be a subclass of ownloop_megatron.mcore.layers.SplitAttention"
                )
            if decoder.moe is not None:
                first_expert = layer.mlp.local_expert_indices[0]
                # ours keeps no state, so the class can change in place
                layer.mlp.token_dispatcher.__class__ = RaggedDispatcher
        first_layer = index * len(model.decoder.layers)
        for name, parameter in model.named_parameters():
            pieces = pieces_of(name, first_layer, first_expert, decoder, config.head, splits_tokens=splits_tokens)
            named.append((parameter, pieces))
        if config.activation_checkpointing == "full":
            model.decoder.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.decoder.layers)
        stages.append(stage)
    return BuiltModel(stages, named)


def _core_model(
    config: TrainerConfig, decoder: DecoderConfig, core_config: object, collection: object, index: int
) -> Any:
    """The GPTModel of a stage."""
    provider = resolve_name(config.engine_args.get(MODEL_PROVIDER, f"{__name__}:core_api.GPTModel"))
    return provider(
        config=core_config,
        transformer_layer_spec=decoder_spec(decoder, decoder.num_layers // config.num_stages),
        vocab_size=decoder.vocab_size,
        max_sequence_length=decoder.max_seq_len,
        pre_process=index == 0,
        post_process=index == config.num_stages - 1,
        share_embeddings_and_output_weights=decoder.tie_embeddings and config.head == "lm",
        position_embedding_type="none",
        scatter_embedding_sequence_parallel=False,  # Megatron-core's own needs CUDA; `Stage` splits the tokens
        pg_collection=collection,
        vp_stage=index // config.pipeline_parallel if config.num_stages > config.pipeline_parallel else None,
    )


def stage_indices(config: TrainerConfig, pipeline_rank: int) -> list[int]:
    """The stages of a rank: one, or with the interleaved schedule two."""
    return list(range(pipeline_rank, config.num_stages, config.pipeline_parallel))


def transformer_config(config: TrainerConfig, decoder: DecoderConfig) -> Any:
    """Megatron-core's configuration of the model and the layout."""
    dtype = DTYPES[config.compute_dtype]
    virtual = config.num_stages // config.pipeline_parallel
    options: dict[str, object] = {
        "num_layers": decoder.num_layers,
        "hidden_size": decoder.dim,
        "ffn_hidden_size": decoder.hidden_dim,
        "num_attention_heads": decoder.num_heads,
        "num_query_groups": decoder.num_kv_heads,
        "kv_channels": decoder.head_dim,
        "layernorm_epsilon": decoder.norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": decoder.family in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": decoder.family == "qwen2",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": config.tensor_parallel,
        "sequence_parallel": config.num_token_shards > 1,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_PORTABLE,
    }
    if decoder.moe is not None:
        options |= {
            "num_moe_experts": decoder.moe.num_experts,
            "moe_ffn_hidden_size": decoder.moe.hidden_dim,
            "moe_router_topk": decoder.moe.experts_per_token,
            # Softmax over all experts; or over the chosen ones, which makes their scores add up to one.
            "moe_router_pre_softmax": not decoder.moe.normalize_scores,
            "moe_router_load_balancing_type": "none",  # so that the gradient is that of the loss alone
            "moe_token_dispatcher_type": "allgather",
        }
    given = {name: value for name, value in config.engine_args.items() if name != MODEL_PROVIDER}
    return core_api.TransformerConfig(**{**options, **given})


class RaggedDispatcher(core_api.MoEAllGatherTokenDispatcher):
    """Gathers the tokens of ranks that may have different numbers of them."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[n, D] tokens and [n, experts] scores of this rank -> [R N, D] and [R N, experts] of all ranks."""
        if self.ep_size == 1:
            return hidden_states, probs
        # ranks of one step may have rows of other lengths
        longest = torch.tensor(len(hidden_states), device=hidden_states.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.ep_group)
        self._num_tokens, self._longest = len(hidden_states), int(longest)
        # Scores of padding are zeros and its routing map is false, so it goes to no expert.
        # as a number: collectives take no booleans
        self.routing_map = self._gather(self.routing_map.to(probs.dtype)) > 0
        return self._gather(hidden_states), self._gather(probs)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[R N, D] contributions of this rank's experts to all tokens -> [n, D] sums for this rank's tokens."""
        if self.ep_size == 1:
            return hidden_states
        start = dist.get_rank(self.ep_group) * self._longest
        combined: Tensor = _Combine.apply(hidden_states, start, start + self._num_tokens, self.ep_group)
        return combined

    def _gather(self, tokens: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(tokens, self._longest, self.ep_group)
        return gathered


class _Gather(torch.autograd.Function):
    """[n, D] -> [R N, D]. Every rank's loss depends on all of it, so gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, longest: int, group: dist.ProcessGroup) -> Tensor:
        start = dist.get_rank(group) * longest
        ctx.region, ctx.group = slice(start, start + len(tokens)), group
        everyone = tokens.new_zeros(dist.get_world_size(group) * longest, *tokens.shape[1:])
        everyone[ctx.region] = tokens  # everyone else's rows are 0, so the sum is the concatenation
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.region], None, None


class _Combine(torch.autograd.Function):
    """[R N, D] -> [n, D], the sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, start: int, stop: int, group: dist.ProcessGroup) -> Tensor:
        ctx.region, ctx.group, ctx.shape = slice(start, stop), group, parts.shape
        total = parts.clone()
        dist.all_reduce(total, group=group)
        return total[ctx.region]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].new_zeros(ctx.shape)
        grad[ctx.region] = grads[0]
        dist.all_reduce(grad, group=ctx.group)
        return grad, None, None, None
