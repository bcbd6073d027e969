"""Builds this rank's stages of a Megatron-core model and the table of its parameters."""

import warnings
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer.config import TrainerConfig
from trainer.engines.decoder_config import DecoderConfig
from trainer.engines.mcore import core_api
from trainer.engines.mcore.engine_args import MODEL_PROVIDER
from trainer.engines.mcore.expert_dispatch import RaggedDispatcher
from trainer.engines.mcore.groups import RankGroups
from trainer.engines.mcore.layers import SplitAttention, decoder_spec
from trainer.engines.mcore.names import Piece, pieces_of
from trainer.engines.mcore.stage import Stage
from trainer.engines.pytorch.ranks import DTYPES

_PORTABLE: Mapping[str, Any] = {
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
                    "attention must be a subclass of trainer.engines.mcore.layers.SplitAttention"
                )
            if decoder.moe is not None:
                first_expert = layer.mlp.local_expert_indices[0]
                layer.mlp.token_dispatcher.__class__ = RaggedDispatcher
        first_layer = index * len(model.decoder.layers)
        for name, parameter in model.named_parameters():
            pieces = pieces_of(name, first_layer, first_expert, decoder, config.head, splits_tokens=splits_tokens)
            named.append((parameter, pieces))
        if config.activation_checkpointing == "full":
            model.decoder.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.decoder.layers)
        stages.append(stage)
    return BuiltModel(stages, named)


def _core_model(config: TrainerConfig, decoder: DecoderConfig, core_config: Any, collection: Any, index: int) -> Any:
    """The GPTModel of a stage."""
    provider: Any = resolve_name(config.engine_args.get(MODEL_PROVIDER, f"{__name__}:core_api.GPTModel"))
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
    options: dict[str, Any] = {
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
