"""Options of trainer and generator for models with experts: what they may be, and what is chosen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from generator.config import GeneratorConfig
from generator.options import engine_options
from ownloop_families import qwen3_moe
from rl.tiny_models import tiny_qwen3_moe
from tests.generator.served_models import served_llama
from tests.trainer.engines.test_decoder_config import LLAMA
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model
from trainer.engines.titan.layout_check import check_layout

MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def check(settings: dict[str, Any], **layout: Any) -> None:
    config = TrainerConfig(**layout)
    check_layout(config, settings)
    if settings is MOE:
        qwen3_moe.check(config, settings)


def test_gpu_logic_kernels_leave_experts_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell vLLM would take FlashInfer, which reorders experts when they are loaded first, but not at a pull."""
    experts, dense = tiny_qwen3_moe(tmp_path / "experts"), served_llama(tmp_path / "dense", tied=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_options(GeneratorConfig(model=experts))["moe_backend"] == "triton"
    assert "moe_backend" not in engine_options(GeneratorConfig(model=dense))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "moe_backend" not in engine_options(GeneratorConfig(model=experts))  # the CPU has one way only


def test_gpu_logic_experts_are_trained_by_both_engines_of_the_core(tmp_path: Path) -> None:
    experts = tiny_qwen3_moe(tmp_path / "experts")
    for engine in ("fsdp2", "torchtitan"):
        check_model(TrainerConfig(model=experts, engine=engine))


@pytest.mark.skipif(torch.cuda.is_available(), reason="hardware: a GPU compiles with Triton")
def test_compilation_of_experts_is_refused(tmp_path: Path) -> None:
    experts = tiny_qwen3_moe(tmp_path)
    with pytest.raises(ValueError, match="the model has experts, which torch does not compile"):
        check_model(TrainerConfig(model=experts, compile=True))
    with pytest.raises(ValueError, match="compute_dtype must be 'bfloat16'"):
        check_model(TrainerConfig(model=experts, compile=True, compute_dtype="float32"))


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            LLAMA,
            {"data_parallel_shard": 2, "expert_parallel": 2},
            "expert_parallel is 2; this model has no experts, so it must be 1",
        ),
        (
            MOE,
            {"data_parallel_shard": 3, "expert_parallel": 3},
            r"expert_parallel is 3, .* the model's 8 experts; they allow \[1, 2, 4, 8\]",
        ),
        (MOE, {"tensor_parallel": 2}, "tensor_parallel is 2 and expert_parallel is 1; .* more than 1, for example 2"),
    ],
)
def test_experts_must_fit_the_layout(model: dict[str, Any], layout: dict[str, int], message: str) -> None:
    check(MOE, tensor_parallel=2, expert_parallel=2)
    with pytest.raises(ValueError, match=message):
        check(model, **layout)


def test_experts_need_sequence_parallelism() -> None:
    check(LLAMA, tensor_parallel=2, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"sequence_parallel is False and tensor_parallel is 2; .* must be True"):
        check(MOE, tensor_parallel=2, expert_parallel=2, sequence_parallel=False)


def test_expert_parallel_ranks_are_among_the_others() -> None:
    config = TrainerConfig(
        data_parallel_shard=2, data_parallel_replicate=3, context_parallel=2, tensor_parallel=2, expert_parallel=8
    )
    assert (config.num_ranks, config.num_data_parallel_ranks, config.num_model_parallel_ranks) == (24, 6, 4)
    with pytest.raises(ValueError, match=r"expert_parallel is 3; .* which is 8: \[1, 2, 4, 8\]"):
        check(MOE, data_parallel_shard=2, context_parallel=2, tensor_parallel=2, expert_parallel=3)
