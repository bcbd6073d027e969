"""Which models, layouts and `engine_args` the megatron engine can train. Does not import Megatron-core: it is slow."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from rl.checks import did_you_mean
from rl.system.decoders import DecoderConfig
from rl.system.hf_config import parse_decoder_config
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits
from trainer.engines.titan.layout_check import check_divides

MODEL_PROVIDER = "model_provider"
"""`module:function` that is called as Megatron-core's `GPTModel` is, and returns one. Forks bring their models so."""
_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_FIELDS = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "pipeline_schedule",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "sequence_parallel": "sequence_parallel",
    "params_dtype": "compute_dtype",
    "pipeline_dtype": "compute_dtype",
    "bf16": "compute_dtype",
    "fp16": "compute_dtype",
    "recompute_granularity": "activation_checkpointing",
    "recompute_modules": "activation_checkpointing",
}
_FIXED = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "normalization", "qk_layernorm"),
    *("gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias", "layernorm_epsilon"),
    *("layernorm_zero_centered_gamma", "memory_efficient_layer_norm", "persist_layer_norm"),
    *("use_cpu_initialization", "perform_initialization", "expert_tensor_parallel_size"),
    *("moe_token_dispatcher_type", "moe_router_load_balancing_type"),
    *("moe_router_pre_softmax", "moe_enable_routing_replay"),
}


def check_layout(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    """The engine's `LayoutCheck`."""
    decoder = parse_decoder_config(hf_config)
    if decoder.family not in _FAMILIES:
        raise ValueError(
            f"config.json: architectures is {hf_config.get('architectures')}; engine 'megatron' trains the families "
            f"{', '.join(_FAMILIES)}; the engines 'torchtitan' and 'fsdp2' train this one"
        )
    _check_options(config)
    check_engine_args(config.engine_args)
    _check_degrees(config)
    _check_tensor_parallel(config, decoder)
    _check_experts(config, decoder)
    _check_stages(config, decoder)
    return ModelLimits(vocab_size=decoder.vocab_size, max_seq_len=decoder.max_seq_len)


def _check_options(config: TrainerConfig) -> None:
    for name, accepted in (
        ("compile", (False,)),
        ("float8", ("none",)),
        ("activation_checkpointing", ("none", "full")),
    ):
        if getattr(config, name) not in accepted:
            choices = " or ".join(map(repr, accepted))
            raise ValueError(
                f"TrainerConfig.{name} is {getattr(config, name)!r}; with engine 'megatron' it must be {choices}. The "
                "engine 'torchtitan' has it"
            )


def _check_degrees(config: TrainerConfig) -> None:
    if config.data_parallel_shard > 1 and config.data_parallel_replicate > 1:
        raise ValueError(
            f"TrainerConfig.data_parallel_shard is {config.data_parallel_shard} and data_parallel_replicate "
            f"{config.data_parallel_replicate}; with engine 'megatron' one of them must be 1: master weights and "
            "optimizer state are sharded over all data-parallel ranks or none"
        )


def _check_tensor_parallel(config: TrainerConfig, decoder: DecoderConfig) -> None:
    tensor_parallel = config.tensor_parallel
    if tensor_parallel == 1:
        return
    check_divides(config, decoder)
    if decoder.moe is not None and not config.sequence_parallel:
        raise ValueError(
            f"TrainerConfig.sequence_parallel is False and tensor_parallel is {tensor_parallel}; experts take "
            "their tokens from equal parts of the sequence, so sequence_parallel must be True"
        )


def _check_experts(config: TrainerConfig, decoder: DecoderConfig) -> None:
    expert_parallel = config.expert_parallel
    if decoder.moe is not None and decoder.moe.normalize_scores and decoder.moe.experts_per_token == 1:
        raise ValueError(
            "config.json: num_experts_per_tok is 1 and norm_topk_prob true, which Megatron-Core refuses; the engine "
            "'torchtitan' trains such a model"
        )
    if expert_parallel == 1:
        return
    if decoder.moe is None:
        raise ValueError(
            f"TrainerConfig.expert_parallel is {expert_parallel}; this model has no experts, so it must be 1"
        )
    sharing = config.num_data_parallel_ranks * config.context_parallel * config.tensor_parallel
    num_experts = decoder.moe.num_experts
    if sharing % expert_parallel or num_experts % expert_parallel:
        divisors = [n for n in range(1, sharing + 1) if sharing % n == 0 and num_experts % n == 0]
        raise ValueError(
            f"TrainerConfig.expert_parallel is {expert_parallel}; it must divide the data-parallel ranks x "
            f"context_parallel x tensor_parallel, which is {sharing}, and the model's {num_experts} experts: {divisors}"
        )


def _check_stages(config: TrainerConfig, decoder: DecoderConfig) -> None:
    pipeline_parallel = config.pipeline_parallel
    if pipeline_parallel == 1:
        return
    if decoder.tie_embeddings and config.head == "lm":
        raise ValueError(
            f"TrainerConfig.pipeline_parallel is {pipeline_parallel}; this model's output projection is its embedding "
            "(tie_word_embeddings), which cannot be in the first and the last stage at once, so it must be 1. "
            "data_parallel_replicate and tensor_parallel work with such a model"
        )
    if decoder.num_layers % config.num_stages:
        per_rank = config.num_stages // pipeline_parallel
        fitting = [n for n in range(1, decoder.num_layers + 1) if decoder.num_layers % (n * per_rank) == 0]
        raise ValueError(
            f"TrainerConfig.pipeline_parallel is {pipeline_parallel}, which makes {config.num_stages} stages; "
            f"Megatron-core wants equally many of the model's {decoder.num_layers} layers in each: {fitting}"
        )


def check_engine_args(engine_args: Mapping[str, object]) -> None:
    """Raises ValueError for an option that Megatron-core does not have, or that is set by something else."""
    for name, value in engine_args.items():
        if name == MODEL_PROVIDER:
            _check_provider(value)
        elif name in _FIELDS:
            raise ValueError(f"TrainerConfig.engine_args[{name!r}]: set TrainerConfig.{_FIELDS[name]} instead")
        elif name in _FIXED:
            raise ValueError(
                f"TrainerConfig.engine_args[{name!r}] follows from the model or the engine and cannot be chosen"
            )
        elif (known := _option_names()) and name not in known:
            raise ValueError(
                f"TrainerConfig.engine_args[{name!r}]: Megatron-core's TransformerConfig has no such option"
                f"{did_you_mean(name, known)}"
            )


def _check_provider(value: object) -> None:
    module, colon, function = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (module and colon and function):
        raise ValueError(f"TrainerConfig.engine_args[{MODEL_PROVIDER!r}] is {value!r}; it must be 'module:function'")


def _option_names() -> list[str]:
    """The fields of `TransformerConfig`, read from its source; none if Megatron-core is not installed."""
    # find_spec of a submodule would import its parent
    if importlib.util.find_spec("megatron") is None or (spec := importlib.util.find_spec("megatron.core")) is None:
        return []
    assert spec.origin is not None
    names: list[str] = []
    for file, class_name in (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ):
        # parsed and not imported: the import takes seconds
        body = ast.parse((Path(spec.origin).parent / file).read_text()).body
        found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
        names += [
            line.target.id
            for line in found.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        ]
    return names
