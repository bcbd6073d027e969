"""Checks `TrainerConfig.engine_args` of the megatron engine without importing Megatron-core, which takes seconds."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.checks import did_you_mean

MODEL_PROVIDER = "model_provider"
"""`module:function` that is called as Megatron-core's `GPTModel` is, and returns one. Forks bring their models so."""

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
    *("moe_token_dispatcher_type", "moe_router_load_balancing_type", "moe_router_pre_softmax"),
}


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
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
    if importlib.util.find_spec("megatron") is None or (spec := importlib.util.find_spec("megatron.core")) is None:
        return []
    assert spec.origin is not None
    names: list[str] = []
    for file, class_name in (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ):
        body = ast.parse((Path(spec.origin).parent / file).read_text()).body
        found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
        names += [
            line.target.id
            for line in found.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        ]
    return names
