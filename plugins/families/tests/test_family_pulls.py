"""Families of models: after three pulls an engine equals a fresh one bit by bit, and transformers in float32."""

from pathlib import Path

import pytest

from generator.config import LoRALimits
from ownloop_families.tiny import TINY_FAMILIES as MODELS
from ownloop_vision.image_prompts import FOLDER
from plugins.vision.tests import with_torchvision
from rl.lora import LoRAConfig
from tests.generator.adapted import largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS
from tests.generator.test_pulls_of_architectures import check_pulls, check_pulls_in_a_process

pytestmark = pytest.mark.vllm

# A mixture first: the first engine of a process decides whether vLLM has a group for experts.
WITH_CODE_OF_VLLM = ("gpt_oss", "deepseek_v3", "glm4_moe", "gemma4")


@pytest.mark.parametrize("name", WITH_CODE_OF_VLLM)
def test_pulls_equal_a_fresh_engine(tmp_path: Path, build_engine: EngineFactory, name: str) -> None:
    check_pulls(MODELS[name][1](tmp_path / "model"), "float32", build_engine)


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("deepseek_v3", marks=[pytest.mark.slow]), "gemma4"])
async def test_adapters_are_those_of_the_merged_model(tmp_path: Path, build_engine: EngineFactory, name: str) -> None:
    directory = MODELS[name][1](tmp_path / "model")
    lora = LoRAConfig(rank=4, alpha=8.0, train_mlp=name == "gemma4")
    limits = LoRALimits(max_rank=8, max_adapters=1, max_loaded=1)
    engine, adapter = build_engine(directory, "float32", lora=limits), random_adapter(directory, 1, lora)

    await pull_adapter(engine, "a", 1, adapter, lora)
    for policy, model in ((None, merged(directory, {})), ("a", merged(directory, adapter, lora))):
        for prompt in PROMPTS:
            (completion,) = await engine.generate(prompt, GREEDY, policy=policy)
            assert largest_error(model, prompt, completion) < 5e-5


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="vLLM's code of Qwen3.5 imports torchvision, which is not installed")
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_pulls_of_gated_delta_rules(tmp_path: Path, name: str) -> None:
    with_torchvision.run(f"{__name__}:of_delta_rules", MODELS[name][0], tmp_path / name)


def of_delta_rules(folder: Path) -> None:
    """In bfloat16, the only dtype in which vLLM's kernels for CPUs compute such a model."""
    check_pulls_in_a_process(MODELS[folder.name][1](folder / "model"), "bfloat16")
