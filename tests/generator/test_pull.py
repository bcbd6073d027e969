"""A pull leaves exactly the weights that a fresh engine would have, or the old ones."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from generator.pull import CopyPlan
from rl.types import SamplingParams
from rl.weights.memory import WeightBuffer
from rl.weights.store import INDEX_KEY, find_record
from rl.weights.version import UnknownVersionError, WeightsError, WeightsMismatchError
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS, check_pulls, export, greedy, moved, pull
from tests.generator.running import started
from tests.generator.served_models import served_llama, served_mistral, served_qwen3
from tests.rl.weights.host_sharing import HostSharing
from tests.stores import FakeStore, key_of
from tests.waiting import until
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm


CASES: list[tuple[Any, bool, str, str]] = [
    (served_llama, True, "float32", "torchstore"),
    (served_qwen3, False, "bfloat16", "torchstore"),
    (served_qwen3, True, "bfloat16", "gpu_memory"),
    (served_llama, True, "float32", "shared_memory"),
    (served_qwen3, False, "bfloat16", "shared_memory"),
    (served_mistral, False, "bfloat16", "shared_memory"),
]
"""TorchStore knows neither families nor dtypes, and memory of a GPU is read as shared memory is. `cpu/test_kinds.py`
pulls more families, tied and untied, in both dtypes."""


@pytest.mark.parametrize(("family", "tied", "dtype", "transport"), CASES)
def test_pulled_weights_equal_a_fresh_engines(
    tmp_path: Path,
    build_engine: EngineFactory,
    family: Any,
    tied: bool,
    dtype: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl.weights.gpu.CUDASharing", HostSharing)
    directory = family(tmp_path / "model", tied=tied)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] == tied
    check_pulls(directory, dtype, transport, FakeStore(), build_engine)


def _part_frozen(directory: Path, version: int, frozen: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights, and the names of those that stay: of the embeddings, and layer 0, where some are fused and packed."""
    names = [name for name in moved(directory, version) if "layers.0." in name or "embed" in name]
    fixed = moved(directory, frozen)
    return {**moved(directory, version), **{name: fixed[name] for name in names}}, names


async def test_frozen_tensors_are_pulled_once(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has other weights in between, rests, or is told that they changed, gets them again."""
    directory = served_qwen3(tmp_path / "model", tied=False)
    engine, store, elsewhere = build_engine(directory, "float32"), FakeStore(), FakeStore()
    publisher, other = (WeightPublisher(torch.float32, store=each) for each in (store, elsewhere))
    loaded: list[bool] = []
    load = CopyPlan.load

    def noted(plan: CopyPlan, memory: Any, workers: Any, *, frozen: bool) -> None:
        loaded.append(frozen)
        load(plan, memory, workers, frozen=frozen)

    monkeypatch.setattr(CopyPlan, "load", noted)

    async def check(version: int, frozen: int) -> None:
        weights, _ = _part_frozen(directory, version, frozen)
        exported = export(directory, weights, torch.float32, tmp_path / str(version))
        started_later = build_engine(directory, "float32")
        await pull(started_later, store, version)
        expected = [c.logprobs for c in await greedy(build_engine(exported, "float32"))]
        assert [c.logprobs for c in await greedy(engine)] == expected
        assert [c.logprobs for c in await greedy(started_later)] == expected

    for version in (1, 2, 3):
        weights, names = _part_frozen(directory, version, 1)
        await publisher.publish(version, weights.items(), names)
        await pull(engine, store, version)
    await other.publish(9, moved(directory, 9).items(), names)
    await pull(engine, elsewhere, 9)
    await pull(engine, store, 3)
    await check(3, 1)
    await engine.sleep()
    await engine.wake_up()
    await pull(engine, store, 3)
    publisher.forget_frozen()
    await publisher.publish(4, moved(directory, 4).items(), names)
    await pull(engine, store, 4)
    assert loaded == [False, False, True, True, True, True]
    await check(4, 4)


@pytest.mark.stranger("A1")
async def test_a_tied_model_whose_files_repeat_the_head(tmp_path: Path, build_engine: EngineFactory) -> None:
    plain = served_qwen3(tmp_path / "plain", tied=True)
    weights = load_file(plain / "model.safetensors")
    repeated = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    directory = export(plain, repeated, torch.float32, tmp_path / "model")
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    assert [c.logprobs for c in await greedy(engine)] == [
        c.logprobs for c in await greedy(build_engine(plain, "float32"))
    ]
    for version in (1, 2):
        await publisher.publish(version, moved(plain, version).items())
        await pull(engine, store, version)
    fresh = build_engine(export(plain, moved(plain, 2), torch.float32, tmp_path / "exported"), "float32")
    assert [c.logprobs for c in await greedy(engine)] == [c.logprobs for c in await greedy(fresh)]


@pytest.mark.paced
async def test_running_requests_finish_under_their_weights(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    await publisher.publish(4, moved(directory, 4).items())
    sampling = SamplingParams(max_tokens=60, seed=0)
    running = asyncio.create_task(engine.generate(PROMPTS[0], sampling, 4))
    await started(engine)
    pulling = asyncio.create_task(pull(engine, store, 4))
    await until(lambda: engine._backlog, "the pull to wait")  # pyright: ignore[reportPrivateUsage]
    later = asyncio.create_task(engine.generate(PROMPTS[0], sampling, 4))
    await pulling
    assert {v for c in await running for v in c.versions} == {0}
    assert {v for c in await later for v in c.versions} == {4}
    assert [c.tokens for c in await later] != [c.tokens for c in await running]


async def test_what_does_not_fit_leaves_the_old_weights(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32")
    weights = moved(directory, 1)
    norm = "model.norm.weight"
    wrong: list[tuple[torch.dtype, Mapping[str, torch.Tensor], str]] = [
        (torch.bfloat16, weights, r"published as torch\.bfloat16; this generator holds torch\.float32"),
        (torch.float32, {n: t for n, t in weights.items() if n != norm}, r"missing: model\.norm\.weight"),
        (torch.float32, {**weights, "lm_head.weight": torch.zeros(64, 128)}, r"not of this model: lm_head\.weight"),
        (torch.float32, {**weights, norm: torch.zeros(64)}, r"of another shape: .*norm\.weight \(64,\) instead of"),
    ]

    before = await greedy(engine)
    for dtype, tensors, message in wrong:
        store = FakeStore()
        await WeightPublisher(dtype, store=store).publish(1, tensors.items())
        with pytest.raises(WeightsMismatchError, match=message):
            await pull(engine, store, 1)
    assert engine.version == 0
    assert await greedy(engine) == before


async def test_versions_that_are_gone_are_refused_by_name(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    with pytest.raises(UnknownVersionError, match="nothing was pushed yet"):
        await pull(engine, store, 1)
    for version in (1, 2):
        await publisher.publish(version, moved(directory, version).items())
    stale = await find_record(store, 1)
    await pull(engine, store, 1)  # the one before the newest is still whole
    before = await greedy(engine)
    await publisher.publish(3, moved(directory, 3).items())
    with pytest.raises(UnknownVersionError, match="versions that can: 2, 3"):
        await pull(engine, store, 1)
    with pytest.raises(UnknownVersionError, match="its buffer holds version 3 by now"):
        await engine.update_weights(stale, store)
    assert engine.version == 1
    assert await greedy(engine) == before


async def test_a_corrupted_tensor_leaves_the_old_weights(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    before = await greedy(engine)
    await publisher.publish(1, moved(directory, 1).items())
    record = await find_record(store, 1)
    buffer = WeightBuffer.open(record.location, writable=True)
    norm = buffer.tensor(next(spec for spec in record.manifest if spec.name == "model.norm.weight"))
    norm[3] += 1e-3
    with pytest.raises(WeightsError, match=r"version 1 is corrupted: 'model\.norm\.weight' is not what"):
        await pull(engine, store, 1)
    assert engine.version == 0
    assert await greedy(engine) == before
    norm[3] -= 1e-3
    await publisher.publish(2, moved(directory, 2).items())
    await pull(engine, store, 2)
    assert engine.version == 2


@pytest.mark.parametrize("packed", [False, True])
async def test_what_torchstore_carries_wrongly_leaves_the_old_weights(
    tmp_path: Path, build_engine: EngineFactory, packed: bool
) -> None:
    # Matrices of 32 rows and more are packed in float32 on any processor; the last pull may have packed from a buffer.
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    norm, head = "model.norm.weight", "model.embed_tokens.weight"

    if packed:
        in_memory = WeightPublisher(torch.float32, "shared_memory", store=store)
        for version in (1, 2):
            await in_memory.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
    old_version, before = engine.version, await greedy(engine)
    publisher = WeightPublisher(torch.float32, "torchstore", store=store)
    for version, name, wrong, message in (
        (3, norm, None, r"TorchStore lost 'model\.norm\.weight' of version 3"),
        (4, norm, lambda t: t + 1e-3, r"version 4 is corrupted: 'model\.norm\.weight' .*its checksum is"),  # pyright: ignore[reportUnknownLambdaType]
        (5, head, lambda t: t[:-1], r"version 5 is corrupted: 'model\.embed_tokens\.weight' .*it is \(63, 128\)"),  # pyright: ignore[reportUnknownLambdaType]
        (6, norm, lambda t: t.to(torch.float64), r"corrupted: .*it is \(128,\) of torch\.float64"),  # pyright: ignore[reportUnknownLambdaType]
    ):
        await publisher.publish(version, moved(directory, version).items())
        key = key_of(await find_record(store, version), name)
        value = store.values.pop(key)
        if wrong is not None:
            store.values[key] = wrong(value)
        with pytest.raises(WeightsError, match=message):
            await pull(engine, store, version)
        assert engine.version == old_version
        assert await greedy(engine) == before
        store.values[key] = value
    await pull(engine, store, 6)
    assert {v for c in await greedy(engine) for v in c.versions} == {6}


async def test_half_loaded_weights_are_never_sampled_from(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    for version in (1, 2):
        await publisher.publish(version, moved(directory, version).items())
    with monkeypatch.context() as no_memory:
        no_memory.setattr("generator.pull.pack_weights", _fail)
        with pytest.raises(MemoryError):
            await pull(engine, store, 2)
    with pytest.raises(WeightsError, match="incomplete since a failed update"):
        await engine.generate(PROMPTS[0], GREEDY)
    await pull(engine, store, 1)
    assert {v for c in await greedy(engine) for v in c.versions} == {1}


def _fail(*_: object) -> None:
    raise MemoryError


async def test_weights_of_another_host_name_their_transport(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("trainer.push.host_identity", lambda: "another host")
        await WeightPublisher(torch.float32, store=store).publish(1, moved(directory, 1).items())
    assert store.values[INDEX_KEY][0].host == "another host"
    with pytest.raises(ValueError, match="needs weight_transport='network'"):
        await pull(engine, store, 1)
