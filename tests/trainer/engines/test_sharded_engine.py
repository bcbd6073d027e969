"""Several ranks must compute what one computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.lora import LoRAConfig
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.trainer import ranks
from tests.trainer.adapters import load_engine_or_adapter
from tests.trainer.reference import ReferencePolicy, by_stored_name
from trainer.config import TrainerConfig
from trainer.engines.plain_ranks import LENGTHS, plan, relative_error

pytestmark = pytest.mark.ranks

INTERLEAVED = {"pipeline_schedule": "Interleaved1F1B"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2_tied": {"data_parallel_shard": 2},
    "replicated2_untied": {"data_parallel_replicate": 2, "activation_checkpointing": "full"},
    "tp2_tied": {"tensor_parallel": 2},
    "fsdp2_tp2_untied": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "pp2_untied": {"pipeline_parallel": 2},
    "pp2_fsdp2_untied": {"pipeline_parallel": 2, "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "ep2_moe": {"data_parallel_shard": 2, "expert_parallel": 2},
    "fsdp2_tp2_ep2_moe": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
    "cp2_tp2_untied": {"context_parallel": 2, "tensor_parallel": 2},
    "hsdp2x2_untied": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "transformers_fsdp2_tied": {"engine": "fsdp2", "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "fsdp1_tied": {"engine": "fsdp1", "data_parallel_shard": 2, "activation_checkpointing": "full"},
    "fsdp1_replicated2_untied": {"engine": "fsdp1", "data_parallel_replicate": 2},
    "fsdp1_hsdp2x2_untied": {"engine": "fsdp1", "data_parallel_replicate": 2, "data_parallel_shard": 2},
    "transformers_hsdp2x2_untied": {"engine": "fsdp2", "data_parallel_replicate": 2, "data_parallel_shard": 2},
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
SLOW = {
    "fsdp1_hsdp2x2_untied",
    "hsdp2x2_untied",
    "pp2_fsdp2_untied",
    "fsdp2_tp2_untied",
    "fsdp2_tp2_ep2_moe",
    "cp2_tp2_untied",
    "transformers_hsdp2x2_untied",
    *(set(ADAPTERS) - {"adapter_fsdp2_tied", "adapter_tp2_tied", "adapter_pp2_untied"}),
}

Results = tuple[TrainerConfig, dict[str, Any], dict[str, Any], Path]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in (*LAYOUTS, *ADAPTERS)],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The layout, its results, those of one rank, and where the layout wrote."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param.endswith("_tied"):
        model = tiny_llama(directory / "model")
    elif request.param.endswith("_moe"):
        model = tiny_qwen3_moe(directory / "model")
    else:
        model = tiny_qwen3(
            directory / "model", tied=False, num_hidden_layers=4 if request.param.endswith("_layers") else 2
        )
    lora = LoRAConfig(rank=4) if request.param in ADAPTERS else None
    one = TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, lora=lora)
    config = replace(one, **{**LAYOUTS, **ADAPTERS}[request.param])
    for name in ("one", "many"):
        (directory / name).mkdir()
    return config, ranks.run(config, directory / "many"), ranks.run(one, directory / "one"), directory


def slack(config: TrainerConfig) -> float:
    """Adam makes whole steps of the smallest gradients, rounding included; an expert of few tokens has many."""
    return 10.0 if config.expert_parallel > 1 else 1.0


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


def worst_after_steps(many: dict[str, Any], one: dict[str, Any], what: str) -> float:
    """`worst` without the few elements whose first gradient is nothing but rounding: Adam makes a whole step of it."""
    kept: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    num_left_out = 0
    for name, gradient in one["gradients"].items():
        rounding = (gradient != 0) & (gradient.abs() < 1e-5 * gradient.square().mean().sqrt())
        num_left_out += int(rounding.sum())
        for tensors, results in zip(kept, (many, one), strict=True):
            tensors[name] = results[what][name].masked_fill(rounding, 0.0)
    assert many[what].keys() == kept[0].keys()
    assert num_left_out < 10
    return worst(*kept)


def test_gradients_equal_those_of_one_rank(results: Results) -> None:
    _, many, one, _ = results
    assert worst(many["gradients"], one["gradients"]) <= 1e-5


def test_loss_that_raises_on_one_rank_raises_on_all_and_changes_nothing(results: Results) -> None:
    _, many, one, _ = results
    assert one["error"] == "ArithmeticError: the longest datum is here"
    assert "longest datum" in many["error"] or "RankFailureError" in many["error"]
    assert worst(many["gradients_after_error"], many["gradients"]) == 0


def test_a_multiplier_is_refused_if_it_matches_no_parameter_of_any_rank(results: Results) -> None:
    _, many, _, _ = results
    assert "multipliers['model.layers.9.*'] matches no parameter; names are such as" in many["unmatched"]


def test_steps_equal_those_of_one_rank(results: Results) -> None:
    config, many, one, _ = results
    np.testing.assert_allclose(many["grad_norms"], one["grad_norms"], rtol=1e-5)
    assert worst_after_steps(many, one, "parameters") <= 1e-5 * slack(config)


def test_checkpoint_restores_bitwise(results: Results) -> None:
    _, many, one, _ = results
    for of_layout in (many, one):
        assert worst(of_layout["loaded"], of_layout["parameters"]) == 0


def test_checkpoint_loads_in_another_layout(results: Results) -> None:
    config, many, _, directory = results
    engine = load_engine_or_adapter(TrainerConfig(model=config.model, compute_dtype="float32", lora=config.lora))
    assert engine.load_checkpoint(directory / "many" / "checkpoint") == 3
    assert worst(dict(engine.hf_parameters()), many["parameters"]) == 0


def test_export_holds_the_parameters(results: Results) -> None:
    config, many, _, directory = results
    if config.lora is not None:  # the merged model is compared by its scores, below
        assert (
            worst(load_file(directory / "many" / "export_peft" / "adapter_model.safetensors"), many["parameters"]) == 0
        )
        return
    model = AutoModelForCausalLM.from_pretrained(directory / "many" / "export", dtype=torch.float32)
    assert worst(by_stored_name(dict(model.named_parameters())), many["parameters"]) == 0


def test_a_push_publishes_the_parameters(results: Results) -> None:
    config, many, one, _ = results
    for of_layout in (many, one):
        assert worst(of_layout["published"], of_layout["parameters"]) == 0
    assert worst_after_steps(many, one, "published") <= 1e-5 * slack(config)


def test_forward_after_a_step_uses_the_new_parameters(results: Results) -> None:
    config, many, _, directory = results
    batch = random_batch(LENGTHS)
    exported = ReferencePolicy(directory / "many" / "export")
    mine = [i for microbatch in plan(config, batch).microbatches[0] for i in microbatch]
    for k, i in enumerate(mine):
        scored = batch[i].weights != 0
        with torch.no_grad():
            logprobs, entropy = exported.logprobs(batch[i]).numpy(), exported.entropy(batch[i]).numpy()
        np.testing.assert_allclose(many["forward"].logprobs[k], np.where(scored, logprobs, 0), atol=1e-4)
        np.testing.assert_allclose(many["forward"].entropy[k], np.where(scored, entropy, 0), atol=1e-4)
