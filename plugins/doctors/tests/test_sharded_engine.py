"""Several ranks must compute what one computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ownloop_doctors.comparisons import require_equal
from ownloop_doctors.several_ranks import LAYOUT_CHECKS, LayoutResults, run_layout
from plugins.doctors.tests.ranks import script
from rl.lora import LoRAConfig
from rl.tiny_models import tiny_dense, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.trainer.adapters import load_engine_or_adapter
from tests.trainer.engine_params import INSTALLED
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine
from trainer.engines.contract.plain_ranks import spawn
from trainer.engines.contract.reference import by_stored_name

pytestmark = pytest.mark.ranks

OTHER_FAMILIES = ("ernie4_5", "exaone4", "hunyuan")
INTERLEAVED = {"pipeline_schedule": "Interleaved1F1B"}
MEGATRON = {"engine": "megatron"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2_tied": {"data_parallel_shard": 2},
    "tp2_tied": {"tensor_parallel": 2},
    "pp2_untied": {"pipeline_parallel": 2},
    "ep2_moe": {"data_parallel_shard": 2, "expert_parallel": 2},
    "transformers_fsdp2_tied": {"engine": "fsdp2", "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "fsdp1_tied": {"engine": "fsdp1", "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "megatron_tp2_tied": {**MEGATRON, "tensor_parallel": 2},
    "megatron_ep2_moe": {**MEGATRON, "data_parallel_replicate": 2, "expert_parallel": 2},
}
SLOW_LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated2_untied": {"data_parallel_replicate": 2, "activation_checkpointing": "full"},
    "fsdp2_tp2_untied": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "pp2_fsdp2_untied": {"pipeline_parallel": 2, "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "fsdp2_tp2_ep2_moe": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "cp2_tp2_untied": {"context_parallel": 2, "tensor_parallel": 2},
    "hsdp2x2_untied": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "tp2_biased": {"tensor_parallel": 2},
    "tp2_ernie4_5": {"tensor_parallel": 2},
    "tp2_exaone4": {"tensor_parallel": 2},
    "cp2_tp2_hunyuan": {"context_parallel": 2, "tensor_parallel": 2},
    "pp2_fsdp2_biased": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "fsdp1_replicated2_untied": {"engine": "fsdp1", "data_parallel_replicate": 2},
    "fsdp1_hsdp2x2_untied": {"engine": "fsdp1", "data_parallel_replicate": 2, "data_parallel_shard": 2},
    "transformers_hsdp2x2_untied": {"engine": "fsdp2", "data_parallel_replicate": 2, "data_parallel_shard": 2},
    "transformers_fsdp2_moe": {"engine": "fsdp2", "data_parallel_shard": 2},
    "transformers_hsdp2x2_moe": {"engine": "fsdp2", "data_parallel_replicate": 2, "data_parallel_shard": 2},
    "megatron_tp2_without_sp_tied": {**MEGATRON, "tensor_parallel": 2, "sequence_parallel": False},
    "megatron_replicated2_untied": {**MEGATRON, "data_parallel_replicate": 2, "activation_checkpointing": "full"},
    "megatron_sharded2_tied": {**MEGATRON, "data_parallel_shard": 2},
    "megatron_sharded2_tp2_untied": {**MEGATRON, "data_parallel_shard": 2, "tensor_parallel": 2},
    "megatron_pp2_sharded2_untied": {**MEGATRON, "pipeline_parallel": 2, "data_parallel_shard": 2},
    "megatron_sharded3_tied": {**MEGATRON, "data_parallel_shard": 3, "activation_checkpointing": "full"},
    "megatron_sharded4_ep2_moe": {**MEGATRON, "data_parallel_shard": 4, "expert_parallel": 2},
    "megatron_sharded2_tp2_ep2_moe": {
        **MEGATRON,
        "data_parallel_shard": 2,
        "tensor_parallel": 2,
        "expert_parallel": 2,
    },
    "megatron_cp2_tied": {**MEGATRON, "context_parallel": 2},
    "megatron_cp3_untied": {**MEGATRON, "context_parallel": 3, "activation_checkpointing": "full"},
    "megatron_cp2_tp2_biased": {**MEGATRON, "context_parallel": 2, "tensor_parallel": 2},
    "megatron_cp2_tp2_without_sp_tied": {
        **MEGATRON,
        "context_parallel": 2,
        "tensor_parallel": 2,
        "sequence_parallel": False,
    },
    "megatron_pp2_cp2_untied": {**MEGATRON, "pipeline_parallel": 2, "context_parallel": 2},
    "megatron_sharded2_cp2_tied": {**MEGATRON, "data_parallel_shard": 2, "context_parallel": 2},
    "megatron_replicated2_cp2_untied": {**MEGATRON, "data_parallel_replicate": 2, "context_parallel": 2},
    "megatron_cp2_ep2_moe": {**MEGATRON, "context_parallel": 2, "expert_parallel": 2},
    "megatron_cp2_tp2_ep2_moe": {**MEGATRON, "context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "megatron_pp2_untied": {**MEGATRON, "pipeline_parallel": 2},
    "megatron_interleaved_pp2_layers": {**MEGATRON, "pipeline_parallel": 2, **INTERLEAVED},
    "megatron_pp2_tp2_untied": {**MEGATRON, "pipeline_parallel": 2, "tensor_parallel": 2},
    "megatron_replicated2_tp2_untied": {**MEGATRON, "data_parallel_replicate": 2, "tensor_parallel": 2},
    "megatron_pp2_replicated2_untied": {**MEGATRON, "pipeline_parallel": 2, "data_parallel_replicate": 2},
    "megatron_tp2_biased": {**MEGATRON, "tensor_parallel": 2},
    "megatron_pp2_biased": {**MEGATRON, "pipeline_parallel": 2},
    "megatron_pp2_moe": {**MEGATRON, "pipeline_parallel": 2},
    "megatron_pp2_ep2_moe": {**MEGATRON, "pipeline_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 2},
    "megatron_tp2_moe": {**MEGATRON, "tensor_parallel": 2, "activation_checkpointing": "full"},
    "megatron_tp2_ep2_moe": {**MEGATRON, "tensor_parallel": 2, "expert_parallel": 2},
    "megatron_replicated2_tp2_ep2_moe": {
        **MEGATRON,
        "data_parallel_replicate": 2,
        "tensor_parallel": 2,
        "expert_parallel": 2,
    },
    "megatron_pp2_tp2_ep2_moe": {**MEGATRON, "pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "megatron_replicated4_ep2_moe": {**MEGATRON, "data_parallel_replicate": 4, "expert_parallel": 2},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapter_fsdp2_tied": {"data_parallel_shard": 2},
    "adapter_tp2_tied": {"tensor_parallel": 2},
    "adapter_tp2_without_sp_untied": {"tensor_parallel": 2, "sequence_parallel": False},
    "adapter_cp2_untied": {"context_parallel": 2, "activation_checkpointing": "full"},
    "adapter_pp2_untied": {"pipeline_parallel": 2},
    "adapter_interleaved_pp2_tp2_layers": {"pipeline_parallel": 2, "tensor_parallel": 2, **INTERLEAVED},
    "adapter_pp2_fsdp2_untied": {"pipeline_parallel": 2, "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "adapter_hsdp2x2_untied": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "adapter_fsdp2_tp2_tied": {"data_parallel_shard": 2, "tensor_parallel": 2, "activation_checkpointing": "selective"},
    "adapter_cp2_tp2_untied": {"context_parallel": 2, "tensor_parallel": 2},
    "adapter_ep2_moe": {"data_parallel_shard": 2, "expert_parallel": 2},
    "adapter_fsdp2_tp2_ep2_moe": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "adapter_transformers_fsdp2_tied": {
        "engine": "fsdp2",
        "data_parallel_shard": 2,
        "activation_checkpointing": "full",
    },
    "adapter_transformers_hsdp2x2_untied": {"engine": "fsdp2", "data_parallel_replicate": 2, "data_parallel_shard": 2},
}
ALL = {**LAYOUTS, **SLOW_LAYOUTS, **ADAPTERS}
FAST = {*LAYOUTS, "adapter_fsdp2_tied"}  # an adapter of two stages: test_sharded_adapters.py


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in ALL],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LayoutResults:
    """The results of the layout, and of one rank of the engine `torchtitan`, or of its own if it replays no experts."""
    engine = ALL[request.param].get("engine", "torchtitan")
    if engine not in INSTALLED:
        pytest.skip(f"the engine {engine!r} is not installed")
    directory = tmp_path_factory.mktemp(request.param)
    if request.param.endswith("_tied"):
        model = tiny_llama(directory / "model")
    elif request.param.endswith("_biased"):
        model = tiny_dense("qwen2", directory / "model", tied=False)
    elif request.param.endswith("_moe"):
        model = tiny_qwen3_moe(directory / "model")
    elif request.param.endswith(OTHER_FAMILIES):
        name = next(each for each in OTHER_FAMILIES if request.param.endswith(each))
        model = tiny_dense(name, directory / "model", head_dim=16)
    else:
        model = tiny_qwen3(
            directory / "model", tied=False, num_hidden_layers=4 if request.param.endswith("_layers") else 2
        )
    lora = LoRAConfig(rank=4) if request.param in ADAPTERS else None
    one = TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, lora=lora)
    config = replace(one, **ALL[request.param])
    if request.param.endswith("_moe") and not find_engine(config.engine).replays_routes:
        one = replace(one, engine=config.engine)  # torchtitan's would replay experts
    many, of_one = (
        run_layout(script, load_engine_or_adapter, c, directory / n) for c, n in ((config, "many"), (one, "one"))
    )
    return LayoutResults(config, many, of_one, directory / "many", load_engine_or_adapter)


@pytest.mark.parametrize("name", LAYOUT_CHECKS)
def test_several_ranks_keep_the_contract(results: LayoutResults, name: str) -> None:
    print(LAYOUT_CHECKS[name](results))


def test_errors_say_what_happened(results: LayoutResults) -> None:
    assert results.one["error"] == "ArithmeticError: the longest datum is here"
    message = "multipliers['model.layers.9.*'] matches no parameter; names are such as"
    assert message in results.many["unmatched"]


def test_export_holds_the_parameters(results: LayoutResults) -> None:
    if results.config.lora is not None:  # the merged model is compared by its scores, in the contract
        exported = load_file(results.directory / "export_peft" / "adapter_model.safetensors")
    else:
        model = AutoModelForCausalLM.from_pretrained(results.directory / "export", dtype=torch.float32)
        exported = by_stored_name(dict(model.named_parameters()), results.many["parameters"].keys())
    require_equal("exported parameters", exported, results.many["parameters"])


def test_ranks_of_an_engine_that_refuses_their_layout_end() -> None:
    spawn(2, _connects_no_rank)


def _connects_no_rank(rank: int) -> None:
    """Stands for an engine that raised ValueError before it made a process group, which the kit caught."""
