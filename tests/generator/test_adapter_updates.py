"""Versions of adapters come, stay and go while requests run, and touch nobody else's."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.config import LoRALimits
from generator.engine import GenerationEngine
from rl.lora import Policy
from rl.types import Completion, SamplingParams
from tests.generator.adapted import WHOLE, largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import PROMPTS
from tests.generator.running import started, versions_of
from tests.generator.served_models import served_llama
from tests.stores import FakeStore
from tests.waiting import until
from trainer.push import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.paced]

LIMITS = LoRALimits(max_rank=8, max_adapters=3, max_loaded=8)
SHORT_PROMPT = PROMPTS[0][:15]  # less than a block: its last bits do not depend on what the prefix cache holds
LONG_PROMPT = [5 + i % 50 for i in range(67)]  # four whole blocks of the prefix cache
POLICIES: tuple[Policy, ...] = (None, "a", ("a", 1))


def _start(engine: GenerationEngine, policy: Policy, prompt: Sequence[int] = PROMPTS[0], num_tokens: int = 60) -> Any:
    return asyncio.create_task(
        engine.generate(prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True), policy=policy)
    )


async def _sample(engine: GenerationEngine, policy: Policy, prompt: Sequence[int] = LONG_PROMPT) -> Completion:
    (completion,) = await engine.generate(prompt, SamplingParams(max_tokens=12, temperature=0), policy=policy)
    return completion


async def test_a_new_version_reaches_requests_of_its_adapter_alone(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LIMITS)
    versions = {number: random_adapter(directory, number) for number in (1, 2)}
    models = {number: merged(directory, adapter) for number, adapter in versions.items()}
    base = merged(directory, {})

    await pull_adapter(engine, "a", 1, versions[1])
    assert await engine.freeze("a", 1)
    (undisturbed,) = await _start(engine, "a")
    running = {policy: _start(engine, policy) for policy in POLICIES}
    several = asyncio.create_task(
        engine.generate(PROMPTS[1], SamplingParams(max_tokens=60, seed=1, ignore_eos=True), 3, policy="a")
    )
    await started(engine)
    await pull_adapter(engine, "a", 2, versions[2], mode="inflight")
    assert not any(task.done() for task in running.values())
    (moved,) = await running["a"]
    found = versions_of(moved)
    assert set(found) == {1, 2}
    assert moved.tokens[: found[1]] == undisturbed.tokens[: found[1]]
    assert largest_error(models[2], PROMPTS[0], moved, start=found[1]) < 5e-5
    assert all(set(versions_of(completion)) == {1, 2} for completion in await several)
    for policy, model, version in ((None, base, 0), (("a", 1), models[1], 1)):
        (kept,) = await running[policy]
        assert set(versions_of(kept)) == {version}
        assert largest_error(model, PROMPTS[0], kept) < 5e-5


async def test_a_draining_pull_waits_for_its_own_adapter_alone(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LIMITS)

    for name in ("a", "b"):
        await pull_adapter(engine, name, 1, random_adapter(directory, 1))
    sampling = SamplingParams(max_tokens=90, seed=1, ignore_eos=True)
    running = asyncio.create_task(engine.generate(PROMPTS[0], sampling, 6, policy="a"))
    await started(engine, num_tokens=1)
    pulls = asyncio.create_task(pull_adapter(engine, "a", 2, random_adapter(directory, 2)))
    await until(lambda: engine._backlog, "the pull to wait")  # pyright: ignore[reportPrivateUsage]
    later = _start(engine, "a", num_tokens=5)
    await pull_adapter(engine, "b", 2, random_adapter(directory, 2))
    (other,) = await _start(engine, "b", num_tokens=5)
    assert set(versions_of(other)) == {2}
    assert not running.done()
    assert {version for completion in await running for version in completion.versions} == {1}
    await pulls
    assert set(versions_of((await later)[0])) == {2}


async def test_a_frozen_version_never_changes(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LIMITS)

    await pull_adapter(engine, "a", 1, random_adapter(directory, 1))
    live = await _sample(engine, "a", SHORT_PROMPT)
    assert not await engine.freeze("a", 2)
    assert await engine.freeze("a", 1)
    assert await engine.freeze("a", 1)
    await pull_adapter(engine, "a", 0, random_adapter(directory, 0), frozen=True)
    first = {policy: await _sample(engine, policy, SHORT_PROMPT) for policy in (("a", 1), ("a", 0), None)}
    assert first["a", 1].logprobs == live.logprobs
    assert largest_error(merged(directory, random_adapter(directory, 0)), SHORT_PROMPT, first["a", 0]) < 5e-5
    for version in range(2, 12):
        options: dict[str, Any] = {"mode": ("inflight", "drain")[version % 2], "keep_prefix_cache": version == 5}
        await pull_adapter(engine, "a", version, random_adapter(directory, version), **options)
        newest = await _sample(engine, "a")
        assert set(versions_of(newest)) == {version}
        if version != 5:  # then it was computed with keys and values of the version before
            assert largest_error(merged(directory, random_adapter(directory, version)), LONG_PROMPT, newest) < 5e-5
        for policy, completion in first.items():
            again = await _sample(engine, policy, SHORT_PROMPT)
            assert (again.tokens, again.logprobs, again.versions) == (
                completion.tokens,
                completion.logprobs,
                completion.versions,
            )


async def test_what_was_computed_stays_on_request(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LIMITS)
    model = merged(directory, random_adapter(directory, 2))

    await pull_adapter(engine, "a", 1, random_adapter(directory, 1))
    running = _start(engine, "a")
    await started(engine)
    await pull_adapter(engine, "a", 2, random_adapter(directory, 2), mode="inflight", keep_prefix_cache=True)
    (completion,) = await running
    found = versions_of(completion)
    assert set(found) == {1, 2}
    prompt = [*PROMPTS[0], *completion.tokens[: found[1]]]
    (rest,) = await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0), policy=None)
    assert rest.logprobs[0] != completion.logprobs[found[1]]
    with pytest.raises(AssertionError):
        assert largest_error(model, PROMPTS[0], completion, start=found[1]) < 5e-5


async def test_a_dropped_policy_finishes_its_requests_and_is_gone(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=LIMITS)
    manager: Any = engine._updates.adapters._manager  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]

    await pull_adapter(engine, "a", 1, random_adapter(directory, 1))
    await engine.freeze("a", 1)
    running, cancelled = _start(engine, "a"), _start(engine, "a", PROMPTS[1])
    await started(engine)
    await engine.drop_policy("a")
    assert len(manager.list_adapters()) == 2
    with pytest.raises(ValueError, match=r"policy is 'a', which this generator does not have; it has None, \('a', 1\)"):
        await _sample(engine, "a")
    # The name may be used again before the last request of its earlier holder has ended.
    await pull_adapter(engine, "a", 5, random_adapter(directory, 5))
    assert (
        largest_error(merged(directory, random_adapter(directory, 5)), LONG_PROMPT, await _sample(engine, "a")) < 5e-5
    )
    cancelled.cancel()
    (completion,) = await running
    assert set(versions_of(completion)) == {1}
    assert largest_error(merged(directory, random_adapter(directory, 1)), PROMPTS[0], completion) < 5e-5
    await engine.drop_policy(("a", 1))
    await engine.drop_policy("a")
    await _sample(engine, None)
    assert len(manager.list_adapters()) == 0


async def test_a_version_of_a_cancelled_call_is_not_kept(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory, store = served_llama(tmp_path / "model", tied=True), FakeStore()
    engine = build_engine(directory, "float32", lora=LIMITS)
    publisher = WeightPublisher(torch.float32, policy="a", lora=WHOLE, store=store)

    await pull_adapter(engine, "a", 1, random_adapter(directory, 1))
    record = await publisher.publish(2, random_adapter(directory, 2).items())
    assert record is not None
    running = _start(engine, "a")
    await started(engine)
    update = asyncio.create_task(engine.update_weights(record, store))
    freeze = asyncio.create_task(engine.freeze("a", 2))
    await until(lambda: engine._backlog, "the update to wait")  # pyright: ignore[reportPrivateUsage]
    assert not any(task.done() for task in (running, update, freeze))
    freeze.cancel()
    await asyncio.gather(running, update)
    await engine.drop_policy("a")
    with pytest.raises(ValueError, match=r"\('a', 2\), which this generator does not have"):
        await _sample(engine, ("a", 2))
