"""The one place that imports Megatron-core, an optional package of which type checkers need to know nothing.

It asks for nothing that needs CUDA: the engine runs Megatron-core's layers on a CPU as they are.
"""

import warnings
from importlib import import_module
from typing import Any


def _find(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that TransformerEngine and Apex, which are optional, are not installed
        return getattr(import_module(f"megatron.core.{module}"), name)


GPTModel = _find("models.gpt", "GPTModel")
ProcessGroupCollection = _find("process_groups_config", "ProcessGroupCollection")
TransformerConfig = _find("transformer", "TransformerConfig")
ColumnParallelLinear = _find("tensor_parallel", "ColumnParallelLinear")
RowParallelLinear = _find("tensor_parallel", "RowParallelLinear")
TransformerBlockSubmodules = _find("transformer.transformer_block", "TransformerBlockSubmodules")
copy_to_tensor_parallel_ranks = _find("tensor_parallel", "copy_to_tensor_model_parallel_region")
initialize_rng_tracker = _find("tensor_parallel.random", "initialize_rng_tracker")
layer_spec = _find("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")
TransformerLayer = _find("transformer.transformer_layer", "TransformerLayer")
SelfAttention = _find("transformer.attention", "SelfAttention")
TopKRouter = _find("transformer.moe.router", "TopKRouter")
MoEAllGatherTokenDispatcher = _find("transformer.moe.token_dispatcher", "MoEAllGatherTokenDispatcher")
