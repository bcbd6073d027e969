"""What has no kernels is refused by name, before any process starts."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.launching.launcher import Launcher
from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig, LoRALimits, Speculation
from generator.options import check_hardware, generator_env
from ownloop_bitwise import entry
from ownloop_bitwise.library import check_one_path
from ownloop_bitwise.part import BitwiseGenerator
from rl.lora import LoRAConfig
from rl.tiny_models import SERVABLE, tiny_dense, tiny_qwen3_moe
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model

TRAINER = TrainerConfig(engine="bitwise")
GENERATOR = GeneratorConfig(numerics="bitwise")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dense("llama", tmp_path_factory.mktemp("model") / "model", **SERVABLE)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2},
        {"head_dtype": "float32"},
        {"compile": True},
        {"float8": "rowwise"},
    ],
    ids=str,
)
def test_a_trainer_of_what_has_no_kernels_is_refused(options: dict[str, Any], model: Path) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        check_model(replace(TRAINER, model=model, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"head_dtype": "float32"},
        {"routes": True},
        {"dtype": "float16"},
        {"engine_args": {"attention_backend": "TORCH_SDPA"}},
    ],
    ids=str,
)
def test_a_generator_of_what_has_no_kernels_is_refused(options: dict[str, Any], model: Path) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"GeneratorConfig\.{name}.*'bitwise'"):
        check_hardware(replace(GENERATOR, model=model, **options), has_gpu=False)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"lora": LoRALimits(max_rank=8)},
        {"speculation": Speculation(source="history")},
        {"engine_args": {"enforce_eager": False}},
        {"engine_args": {"attention_backend": "FLASH_ATTN"}},
    ],
    ids=str,
)
def test_on_a_gpu_a_generator_of_what_has_no_kernels_is_refused(options: dict[str, Any], model: Path) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"GeneratorConfig\.{name}.*'bitwise'"):
        BitwiseGenerator(replace(GENERATOR, model=model, **options), has_gpu=True).check()


def test_on_a_gpu_vllm_computes_batch_invariantly_and_a_trainer_takes_no_adapter(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BitwiseGenerator(replace(GENERATOR, model=model), has_gpu=True).check()
    assert generator_env(replace(GENERATOR, model=model), has_gpu=True)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in generator_env(replace(GENERATOR, model=model), has_gpu=False)
    monkeypatch.setattr(entry, "sees_gpu", lambda: True)
    check_model(replace(TRAINER, model=model))
    with pytest.raises(ValueError, match=r"TrainerConfig\.lora.*'bitwise'"):
        check_model(replace(TRAINER, model=model, lora=LoRAConfig(rank=4)))


def test_gpus_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"capability 8\.0 in the trainer on a and .*9\.0.* GPUs of one kind"):
        check_one_path({"the trainer on a": "compute capability 8.0", "the generator": "compute capability 9.0"})


def test_models_with_other_layers_are_refused_on_either_side(tmp_path: Path) -> None:
    """Of a model with sliding windows or soft caps the key of its configuration, or its architecture, is named."""
    for model, what in (
        (tiny_dense("qwen2", tmp_path / "windows", use_sliding_window=True), "use_sliding_window is True"),
        (tiny_dense("phi3", tmp_path / "phi3"), "Phi3ForCausalLM"),
        (tiny_dense("hunyuan", tmp_path / "hunyuan", head_dim=16), "hunyuan"),
        (tiny_qwen3_moe(tmp_path / "moe"), "Qwen3"),
    ):
        with pytest.raises(ValueError, match=f"{what}.*numerics left out"):
            check_model(replace(TRAINER, model=model))
        with pytest.raises(ValueError, match=f"{what}.*numerics left out"):
            BitwiseGenerator(replace(GENERATOR, model=model), has_gpu=False).check()


@pytest.mark.parametrize(
    ("trainer", "generator", "what"),
    [
        (TRAINER, GeneratorConfig(), "engine is 'bitwise' and GeneratorConfig.numerics is ''"),
        (TrainerConfig(), GENERATOR, "engine is 'torchtitan' and GeneratorConfig.numerics is 'bitwise'"),
        (TRAINER, replace(GENERATOR, dtype="float32"), "compute_dtype is 'bfloat16' and GeneratorConfig.dtype is"),
    ],
)
def test_one_side_alone_and_two_dtypes_are_refused(
    trainer: TrainerConfig, generator: GeneratorConfig, what: str, model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Launcher(tmp_path) as launcher:
            launcher.trainer(model, trainer, generator=replace(generator, max_model_len=64))

    with pytest.raises(ValueError, match=what):
        asyncio.run(main())


def test_a_recipe_sets_both_sides_by_one_word(model: Path) -> None:
    def recipe(numerics: str = "bitwise", **trainer: Any) -> GRPOConfig:
        return GRPOConfig(
            model=str(model),
            numerics=numerics,
            env=EvenWords(),
            trainer=TrainerConfig(**trainer),
            generator=GeneratorConfig(),
            sampling=SamplingParams(max_tokens=8),
            num_steps=1,
            prompts_per_step=1,
            group_size=2,
            learning_rate=1e-3,
        )

    assert recipe().policy_config.engine == recipe().generator_config.numerics == "bitwise"
    assert (recipe("").policy_config.engine, recipe("").generator_config.numerics) == ("torchtitan", "")
    with pytest.raises(ValueError, match=r"trainer\.engine is 'fsdp2' and numerics is 'bitwise'"):
        recipe(engine="fsdp2")
    with pytest.raises(ValueError, match=r"GRPOConfig\.numerics is 'bitwize'.*'bitwise'"):
        recipe("bitwize")
