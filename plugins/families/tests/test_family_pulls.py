"""Families of models: after three pulls an engine equals a fresh one bit by bit, and transformers in float32."""

import asyncio
import contextlib
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from generator.config import LoRALimits
from ownloop_vision.image_prompts import FOLDER
from plugins.vision.tests import with_torchvision
from rl.lora import LoRAConfig
from rl.types import SamplingParams
from rl.weights.versions import find_record
from tests.architectures import MODELS
from tests.generator.adapted import largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory, engine_factory
from tests.generator.published import GREEDY, PROMPTS, export, greedy, moved, pull
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

# A mixture first: the first engine of a process decides whether vLLM has a group for experts.
WITH_CODE_OF_VLLM = {
    "gpt_oss": "float32",
    "deepseek_v3": "float32",
    "glm4_moe": "float32",
    "gemma2": "float32",
    "gemma4": "float32",
}
WITH_CODE_OF_TRANSFORMERS = ("olmo3", "seed_oss", "smollm3")
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)


def check_pulls(folder: Path, name: str, dtype: str, build_engine: EngineFactory) -> None:
    directory, torch_dtype, store = MODELS[name][1](folder / "model"), getattr(torch, dtype), FakeStore()
    exported = export(directory, moved(directory, 3), torch_dtype, folder / "3")
    # Before there is an engine: vLLM changes classes of transformers that it serves.
    expected = _logprobs(exported) if dtype == "float32" else []
    engine = build_engine(directory, dtype)

    async def main() -> None:
        before = await greedy(engine)
        publisher = WeightPublisher(torch_dtype, "shared_memory", store=store)
        for version in (1, 2, 3):
            await publisher.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
        after = [c.logprobs for c in await greedy(engine)]
        plan = engine._updates._loader._plan  # pyright: ignore[reportPrivateUsage]
        assert plan is not None
        assert plan.fits(await find_record(store, 3)), "the third pull repeated the copies of the first"
        assert after == [c.logprobs for c in await greedy(build_engine(exported, dtype))]
        assert all(one != other.logprobs for one, other in zip(after, before, strict=True))
        for prompt, logprobs in zip(PROMPTS, expected, strict=False):
            (completion,) = await engine.generate(prompt, SCORED)
            assert completion.prompt_logprobs == pytest.approx(logprobs, abs=5e-5)

    asyncio.run(main())


@torch.no_grad()
def _logprobs(directory: Path) -> list[list[float]]:
    """Of each prompt's tokens but the first, computed by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    scored: list[list[float]] = []
    for prompt in PROMPTS:
        tokens = torch.tensor(prompt)
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        scored.append(logprobs.gather(1, tokens[1:, None])[:, 0].tolist())
    return scored


@pytest.mark.parametrize("name", WITH_CODE_OF_VLLM)
def test_pulls_equal_a_fresh_engine(tmp_path: Path, build_engine: EngineFactory, name: str) -> None:
    check_pulls(tmp_path, name, WITH_CODE_OF_VLLM[name], build_engine)


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("deepseek_v3", marks=[pytest.mark.slow]), "gemma4"])
def test_adapters_are_those_of_the_merged_model(tmp_path: Path, build_engine: EngineFactory, name: str) -> None:
    directory = MODELS[name][1](tmp_path / "model")
    lora = LoRAConfig(rank=4, alpha=8.0, train_mlp=name == "gemma4")
    limits = LoRALimits(max_rank=8, max_adapters=1, max_loaded=1)
    engine, adapter = build_engine(directory, "float32", lora=limits), random_adapter(directory, 1, lora)

    async def main() -> None:
        await pull_adapter(engine, "a", 1, adapter, lora)
        for policy, model in ((None, merged(directory, {})), ("a", merged(directory, adapter, lora))):
            for prompt in PROMPTS:
                (completion,) = await engine.generate(prompt, GREEDY, policy=policy)
                assert largest_error(model, prompt, completion) < 5e-5

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE_OF_TRANSFORMERS)
def test_pulls_of_a_family_served_by_transformers(tmp_path: Path, name: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_in_a_process, args=(tmp_path, name))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="vLLM's code of Qwen3.5 imports torchvision, which is not installed")
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_pulls_of_gated_delta_rules(tmp_path: Path, name: str) -> None:
    with_torchvision.run(f"{__name__}:of_delta_rules", MODELS[name][0], tmp_path / name)


def of_delta_rules(folder: Path) -> None:
    """In bfloat16, the only dtype in which vLLM's kernels for CPUs compute such a model."""
    _in_a_process(folder, folder.name, "bfloat16")


def _in_a_process(folder: Path, name: str, dtype: str = "float32") -> None:
    """In one of its own, because the classes of transformers stay changed."""
    with contextlib.closing(engine_factory()) as factories:
        check_pulls(folder, name, dtype, next(factories))
