"""A generator reads prompts with images as a trainer scores them, before and after pulls, and so do its adapters."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from generator.config import LoRALimits
from generator.engine import GenerationEngine
from generator.openai_calls import OpenAICall
from ownloop_server.openai_serving import OpenAIServing
from ownloop_vision.image_prompts import FOLDER
from ownloop_vision.qwen_images import file_bytes
from plugins.vision.tests import with_torchvision
from plugins.vision.tests.vision import (
    WITH_IMAGES,
    WORDS,
    ImageReference,
    image_batch,
    image_datum,
    parts,
    photo,
    picture,
)
from rl.images import images_of, join_tokens
from rl.lora import LoRAConfig, tensor_name
from rl.losses import get_loss
from rl.rollouts.episodes import rollout_to_datum
from rl.rollouts.rendering import Renderer
from rl.system.hf_config import inspect_model
from rl.types import AdamParams, Completion, Datum, Rollout, SamplingParams, Turn
from tests.generator.adapted import pull_adapter
from tests.generator.engines import engine_factory
from tests.generator.published import export, moved, pull
from tests.generator.running import run_paced, started, versions_of
from tests.stores import FakeStore
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.push import WeightPublisher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER.is_dir() and find_spec("torchvision") is None,
        reason="vLLM's code of models that read images imports torchvision, which is not installed",
    ),
]
SAMPLING = SamplingParams(max_tokens=8, seed=1)
SIDES = (32, 64, 96, 128)
IMAGE_TOKEN = 6
BOUND = 1e-4
LANGUAGE = LoRAConfig(rank=4, alpha=8.0)
NO_LANGUAGE = replace(LANGUAGE, train_attn=False, train_mlp=False, train_unembed=False)
"""Adapts nothing but vision."""


def prompts_of(model: Path, count: int) -> list[tuple[int, ...]]:
    """Prompts of one and two images of many shapes."""
    renderer, rng = Renderer(model), np.random.default_rng(0)

    def shape() -> tuple[int, int]:
        height, width = rng.choice(SIDES, 2)
        return int(height), int(width)

    further = [(shape(),) if number % 2 else () for number in range(count)]
    return [renderer.encode(parts("what", shape(), "colour", *each, "square")) for each in further]


def as_data(prompts: Sequence[tuple[int, ...]], groups: Sequence[Sequence[Completion]]) -> list[Datum]:
    """A datum for each completion."""
    turns = [Turn(prompt_tokens=p, completion=each) for p, group in zip(prompts, groups, strict=True) for each in group]
    return [rollout_to_datum(Rollout(turns=(turn,), reward=0.0), 1.0) for turn in turns]


def difference(found: NDArray[np.float32], datum: Datum) -> float:
    """Of the log-probs of sampled tokens, the largest."""
    scored = datum.weights > 0
    return float(np.abs(found - datum.loss_inputs["logprobs"])[scored].max())


def difference_to(model: Path, data: Sequence[Datum]) -> float:
    """To transformers, of datums without a sampled image token, which transformers takes for an image."""
    reference = ImageReference(model)
    usual = [datum for datum in data if IMAGE_TOKEN not in datum.tokens[datum.weights > 0][1:]]
    assert usual
    return max(difference(reference.logprobs(datum).detach().numpy(), datum) for datum in usual)


async def sampled(
    engine: GenerationEngine, prompts: Sequence[tuple[int, ...]], policy: str | None = None
) -> list[Datum]:
    groups = await asyncio.gather(*(engine.generate(prompt, SAMPLING, 2, policy=policy) for prompt in prompts))
    return as_data(prompts, groups)


def train(model: Path, target: Path) -> tuple[Engine, Path]:
    """A trainer after one step, and what it exports."""
    engine = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32", train_vision=True))
    engine.forward_backward([image_batch(model)], get_loss("importance_sampling"))
    engine.optim_step(AdamParams(learning_rate=1e-2))
    engine.export_hf(target, torch.float32)
    return engine, target


def check_log_probs(model: Path, folder: Path) -> None:
    """Of 64 prompts, by what a trainer exports; of pulled weights, against transformers; of a turn with an image."""
    trained, model = train(model, folder / "trained")
    prompts, store = prompts_of(model, 64), FakeStore()
    frozen = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32")).frozen_names
    tower = {name: tensor for name, tensor in moved(model, 1).items() if name in frozen}
    assert tower

    async def main(engine: GenerationEngine) -> None:
        data = await sampled(engine, prompts)
        scored = trained.forward([data[start : start + 16] for start in range(0, len(data), 16)]).logprobs
        assert max(map(difference, scored, data)) < BOUND
        await check_prompt(engine, trained, prompts[1])
        publisher = WeightPublisher(torch.float32, "shared_memory", store=store)
        for version in (1, 2, 3):  # with a vision tower that stays as it is
            await publisher.publish(version, {**moved(model, version), **tower}.items(), tower)
            await pull(engine, store, version)
        pulled = await sampled(engine, prompts[:8])
        export(model, {**moved(model, 3), **tower}, torch.float32, folder / "3")
        assert difference_to(folder / "3", pulled) < BOUND
        restarted = build(model, "float32")
        await pull(restarted, store, 3)
        again = await sampled(restarted, prompts[:8])
        found = [[datum.loss_inputs["logprobs"].tolist() for datum in data] for data in (pulled, again)]
        assert found[0] == found[1]
        first = await engine.generate(prompts[0], SAMPLING)
        reply = Renderer(model).encode_reply(parts("red", (64, 64)), first[0].tokens)
        whole = join_tokens(prompts[0], first[0].tokens, reply)
        assert len(images_of(whole)) == 2
        second = as_data([whole], [await engine.generate(whole, SAMPLING)])
        trainer = load_engine(TrainerConfig(model=folder / "3", engine="fsdp2", compute_dtype="float32"))
        assert difference(trainer.forward([second]).logprobs[0], second[0]) < BOUND
        await check_chat(engine, model)

    with contextlib.closing(engine_factory()) as factories:
        build = next(factories)
        asyncio.run(main(build(model, "float32")))


async def check_prompt(engine: GenerationEngine, trained: Engine, prompt: tuple[int, ...]) -> None:
    """A prompt's own log-probs, for which Tinker's `compute_logprobs` asks."""
    (scored,) = await engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert scored.prompt_logprobs is not None
    datum = image_datum(prompt, ())
    (expected,) = trained.forward([[datum]]).logprobs
    found = np.array(scored.prompt_logprobs, np.float32)
    assert np.abs(found - expected)[datum.weights > 0].max() < BOUND


async def check_chat(engine: GenerationEngine, model: Path) -> None:
    """Chats in OpenAI's form with a data URL are read as the same prompts of a renderer; bad ones are a sentence."""
    serving = OpenAIServing(engine, tool_parser="", reasoning_parser="")

    async def ask(url: str, **options: object) -> tuple[int, dict[str, Any]]:
        content = [{"type": "text", "text": " what "}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, **options}
        call = OpenAICall(kind="chat", body=json.dumps(body).encode(), policy=None, model="m")
        status, answer = await serving.answer(call)
        assert isinstance(answer, str)
        return status, json.loads(answer)

    prompt: tuple[int, ...] = ()
    images = (picture(75, 52), transparent(96, 64), photo(32, 64, 6), picture(64, 64))
    for file in map(file_bytes, images):
        parts = [{"type": "text", "text": " what "}, {"type": "image", "image": file}]
        prompt = Renderer(model).encode([{"role": "user", "content": parts}])
        (expected,) = await engine.generate(prompt, SamplingParams(max_tokens=6, temperature=0))
        status, answer = await ask(as_url(file), logprobs=True, return_token_ids=True)
        assert status == 200, answer
        assert answer["prompt_token_ids"] == [*prompt]
        assert answer["choices"][0]["token_ids"] == [*expected.tokens]
        found = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
        assert found == pytest.approx(expected.logprobs, abs=1e-5)
    for url, options, said in (
        ("http://example.org/a.png", {}, "domain"),
        (as_url(file_bytes(picture(64, 64))[:-900]), {}, "image"),
        (as_url(b"no image"), {}, "image"),
        (as_url(file_bytes(picture(64, 64))), {"truncate_prompt_tokens": len(prompt) - 1}, "truncate_prompt_tokens"),
        (as_url(file_bytes(picture(64, 64))), {"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs"),
    ):
        status, answer = await ask(url, **options)
        assert status == 400, (url, answer)
        assert said in answer["error"]["message"]


def as_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def transparent(height: int, width: int) -> Image.Image:
    """Its pixels are seen by some programs in colours of their own, and by others on white."""
    image = picture(height, width).convert("RGBA")
    image.putalpha(Image.new("L", image.size, 90))
    return image


def random_adapter(
    model: Path, lora: LoRAConfig, folder: Path, seed: int, *, vision: bool
) -> tuple[dict[str, torch.Tensor], Path]:
    """Its tensors, and the merged model."""
    generator, adapter = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    weights = load_file(model / "model.safetensors")
    for key in sorted(weights):
        module, shape = key.removesuffix(".weight"), weights[key].shape
        is_tower = NO_LANGUAGE.adapts(module)
        if module == key or len(shape) != 2 or "embed" in key or not (vision if is_tower else lora.adapts(module)):
            continue
        a = torch.randn(4, shape[1], generator=generator) / shape[1] ** 0.5
        b = 0.1 * torch.randn(shape[0], 4, generator=generator)
        adapter |= {tensor_name(module, "A"): a, tensor_name(module, "B"): b}
        weights[key] = weights[key] + lora.scale * (b @ a)
    return adapter, export(model, weights, torch.float32, folder)


def check_adapters(model: Path, folder: Path) -> None:
    """Adapters of the language model, of vision and of both against merged models, of the same images in one batch.

    A version that comes while requests run computes their images anew.
    """
    chosen = {"language": LANGUAGE, "vision": NO_LANGUAGE, "both": LANGUAGE}
    made = {
        name: random_adapter(model, chosen[name], folder / name, seed, vision=name != "language")
        for seed, name in enumerate(chosen)
    }
    adapter, directory = random_adapter(model, LANGUAGE, folder / "second", 7, vision=True)
    prompts = prompts_of(model, 8)

    async def main(engine: GenerationEngine) -> None:
        for name, lora in chosen.items():
            await pull_adapter(engine, name, 1, made[name][0], lora)
        expected = {None: model, **{name: merged for name, (_, merged) in made.items()}}
        data = await asyncio.gather(*(sampled(engine, prompts, policy) for policy in expected))
        for found, merged in zip(data, expected.values(), strict=True):
            assert difference_to(merged, found) < BOUND
        sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        running = asyncio.create_task(engine.generate(prompts[0], sampling, policy="both"))
        await started(engine)
        await pull_adapter(engine, "both", 2, adapter, LANGUAGE, mode="inflight")
        (completion,) = await running
        before = versions_of(completion)[1]
        (datum,) = as_data(prompts[:1], [[completion]])
        scored = ImageReference(directory).logprobs(datum).detach().numpy()[datum.weights > 0]
        assert np.abs(scored - completion.logprobs)[before:].max() < BOUND
        assert difference_to(directory, await sampled(engine, prompts, "both")) < BOUND

    with contextlib.closing(engine_factory()) as factories:
        limits = LoRALimits(max_rank=8, max_adapters=4, max_loaded=4, vision=True)
        run_paced(main(next(factories)(model, "float32", lora=limits)))


def run(check: str, name: str, folder: Path) -> None:
    model = WITH_IMAGES[name](folder / "model", WORDS)
    with_torchvision.run(f"{__name__}:{check}", inspect_model(model).architecture, model, folder)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_log_probs_are_the_trainers(tmp_path: Path, name: str) -> None:
    run("check_log_probs", name, tmp_path)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_adapters_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    run("check_adapters", name, tmp_path)
