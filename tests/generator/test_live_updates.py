"""New weights while requests run: what was sampled before stays, what follows is the new weights' own."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.engine import GenerationEngine
from rl.types import Completion, SamplingParams
from rl.weights.store import find_record
from rl.weights.version import UnknownVersionError, WeightsError
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS, export, greedy, moved, pull
from tests.generator.running import started, versions_of
from tests.generator.served_models import served_llama
from tests.stores import FakeStore, key_of
from trainer.push import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.paced]

LONG = SamplingParams(max_tokens=90, temperature=0)


async def _updated_midway(engine: GenerationEngine, store: FakeStore, version: int, **options: Any) -> Completion:
    running = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
    await started(engine)
    await pull(engine, store, version, mode="inflight", **options)
    assert not running.done()
    return (await running)[0]


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bfloat16", "float16"))]
)
async def test_the_rest_of_a_completion_is_a_fresh_engines(
    tmp_path: Path, build_engine: EngineFactory, dtype: str
) -> None:
    directory, torch_dtype = served_llama(tmp_path / "model", tied=True), getattr(torch, dtype)
    engine, store = build_engine(directory, dtype), FakeStore()
    fresh = build_engine(export(directory, moved(directory, 3), torch_dtype, tmp_path / "exported"), dtype)

    (undisturbed,) = await engine.generate(PROMPTS[0], LONG)
    await WeightPublisher(torch_dtype, store=store).publish(3, moved(directory, 3).items())
    completion = await _updated_midway(engine, store, 3)
    spans = versions_of(completion)
    assert set(spans) == {0, 3}
    num_old = spans[0]
    assert completion.tokens[:num_old] == undisturbed.tokens[:num_old]
    assert completion.logprobs[:num_old] == undisturbed.logprobs[:num_old]
    prompt = [*PROMPTS[0], *completion.tokens[:num_old]]
    (rest,) = await fresh.generate(prompt, SamplingParams(max_tokens=90 - num_old, temperature=0))
    assert completion.tokens[num_old:] == rest.tokens
    assert completion.logprobs[num_old:] == rest.logprobs
    # A prompt that was computed under the old weights is not found in the prefix cache.
    assert await greedy(engine) == [_at_version(c, 3) for c in await greedy(fresh)]


def _at_version(completion: Completion, version: int) -> Completion:
    return replace(completion, versions=(version,) * len(completion.tokens))


async def test_what_attention_kept_stays_on_request(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    fresh = build_engine(export(directory, moved(directory, 3), torch.float32, tmp_path / "exported"), "float32")

    await WeightPublisher(torch.float32, store=store).publish(3, moved(directory, 3).items())
    completion = await _updated_midway(engine, store, 3, keep_prefix_cache=True)
    spans = versions_of(completion)
    assert set(spans) == {0, 3}
    prompt = [*PROMPTS[0], *completion.tokens[: spans[0]]]
    (rest,) = await fresh.generate(prompt, SamplingParams(max_tokens=90 - spans[0], temperature=0))
    assert completion.logprobs[spans[0] :] != rest.logprobs  # its attention still sees the old weights' keys
    await pull(engine, store, 3)
    assert await greedy(engine) == [_at_version(c, 3) for c in await greedy(fresh)]


async def test_many_updates_lose_no_request(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32", max_num_seqs=8), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)
    weights = [moved(directory, seed) for seed in range(3)]

    completions: list[Completion] = []
    version = num_asked = 0

    async def stream(index: int) -> None:
        nonlocal num_asked
        while num_asked < 24 or version < 10:
            num_asked += 1
            sampling = SamplingParams(max_tokens=10 + index % 7, seed=num_asked)
            completions.extend(await engine.generate(PROMPTS[index % len(PROMPTS)], sampling))

    streams = asyncio.gather(*map(stream, range(8)))
    while not streams.done():
        version += 1
        await publisher.publish(version, weights[version % 3].items())
        await pull(engine, store, version, mode="inflight", keep_prefix_cache=version % 3 == 0)
        await asyncio.sleep(0.01)  # a step or two come between updates
    await streams
    assert len(completions) == num_asked
    spans = [versions_of(completion) for completion in completions]
    assert sum(len(span) > 1 for span in spans) > 8
    assert max(max(span) for span in spans) <= version


async def test_an_update_that_fails_leaves_requests_running(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()

    async def failing(running: Sequence[asyncio.Task[list[Completion]]], version: int, error: type[Exception]) -> None:
        await started(engine)
        with pytest.raises(error):
            await pull(engine, store, version, mode="inflight")
        await asyncio.wait(running)

    (undisturbed,) = await engine.generate(PROMPTS[0], LONG)
    await WeightPublisher(torch.float32, "torchstore", store=store).publish(7, moved(directory, 7).items())
    del store.values[key_of(await find_record(store, 7), "model.norm.weight")]
    for version, error in ((6, UnknownVersionError), (7, WeightsError)):
        running = [asyncio.create_task(engine.generate(PROMPTS[0], LONG))]
        await failing(running, version, error)
        assert running[0].result() == [undisturbed]
    publisher = WeightPublisher(torch.float32, store=store)
    for version in (1, 2):
        await publisher.publish(version, moved(directory, version).items())
    running = [asyncio.create_task(engine.generate(prompt, LONG, 1)) for prompt in PROMPTS[:2]]
    with monkeypatch.context() as no_memory:
        no_memory.setattr("generator.pull.pack_weights", _fail)
        await failing(running, 2, MemoryError)
    for task in running:
        with pytest.raises(WeightsError, match="incomplete since a failed update"):
            task.result()
    await pull(engine, store, 1, mode="inflight")
    assert {v for c in await greedy(engine) for v in c.versions} == {1}
    assert len(await engine.generate(PROMPTS[0], GREEDY)) == 1


def _fail(*_: object) -> None:
    raise MemoryError
