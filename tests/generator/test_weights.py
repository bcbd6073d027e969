"""A pull leaves exactly the weights that a fresh engine would have, or the old ones."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generator.engine import GenerationEngine
from generator.weights import find_record
from rl.types import Completion, SamplingParams
from rl.weights import INDEX_KEY, Transport, UnknownVersionError, WeightsError, WeightsMismatchError
from tests.generator.conftest import EngineFactory
from tests.generator.served_models import served_llama, served_qwen3
from trainer.weights import WeightPublisher

PROMPTS = [list(range(3 + 3 * i, 33 + 4 * i)) for i in range(5)]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


class FakeStore:
    """A dictionary with TorchStore's interface."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def put(self, key: str, value: Any) -> None:
        self.values[key] = value

    async def get(self, key: str) -> Any:
        if key not in self.values:
            raise KeyError(f"Unable to locate {key} in any storage volumes.")
        return self.values[key]

    async def delete(self, key: str) -> None:
        del self.values[key]


async def _greedy(engine: GenerationEngine) -> list[Completion]:
    # One after the other: how requests fall into batches changes the last bits of a log-prob.
    return [(await engine.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


async def _pull(engine: GenerationEngine, store: FakeStore, version: int) -> None:
    await engine.update_weights(await find_record(store, version), store)


def _moved(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights, every one of them another than in the directory."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    return {name: t + 0.03 * torch.randn(t.shape, generator=generator) for name, t in weights.items()}


def _export(source: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, destination: Path) -> Path:
    destination.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (destination / path.name).write_bytes(path.read_bytes())
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(cast, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


@pytest.mark.parametrize("transport", ["shared_memory", "torchstore"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [served_llama, served_qwen3])
def test_pulled_weights_equal_a_fresh_engines(
    tmp_path: Path, build_engine: EngineFactory, family: Any, tied: bool, dtype: str, transport: Transport
) -> None:
    directory = family(tmp_path / "model", tied=tied)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] == tied
    engine, torch_dtype = build_engine(directory, dtype), getattr(torch, dtype)
    store = FakeStore()
    publisher = WeightPublisher(torch_dtype, transport, store=store)

    async def main() -> None:
        before = await _greedy(engine)
        for version in (1, 2, 3):
            await publisher.publish(version, _moved(directory, version).items())
            await _pull(engine, store, version)
        after = await _greedy(engine)
        exported = _export(directory, _moved(directory, 3), torch_dtype, tmp_path / "exported")
        assert [c.logprobs for c in after] == [c.logprobs for c in await _greedy(build_engine(exported, dtype))]
        assert [c.logprobs for c in after] != [c.logprobs for c in before]
        assert {version for c in after for version in c.versions} == {3}
        assert engine.version == 3

    asyncio.run(main())


def test_the_real_model_takes_in_new_weights(tmp_path: Path, build_engine: EngineFactory, smollm2: Path) -> None:
    # Its matrices are large enough for every way in which vLLM packs weights on the CPU.
    engine, store = build_engine(smollm2, "bfloat16"), FakeStore()
    weights = {name: 1.01 * tensor.float() for name, tensor in load_file(smollm2 / "model.safetensors").items()}

    async def main() -> None:
        before = await _greedy(engine)
        await WeightPublisher(torch.bfloat16, store=store).publish(1, weights.items())
        await _pull(engine, store, 1)
        after = await _greedy(engine)
        fresh = build_engine(_export(smollm2, weights, torch.bfloat16, tmp_path / "exported"), "bfloat16")
        assert [c.logprobs for c in after] == [c.logprobs for c in await _greedy(fresh)]
        assert [c.logprobs for c in after] != [c.logprobs for c in before]

    asyncio.run(main())


def test_running_requests_finish_under_their_weights_and_later_ones_wait(
    tmp_path: Path, build_engine: EngineFactory
) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    async def main() -> None:
        await publisher.publish(4, _moved(directory, 4).items())
        sampling = SamplingParams(max_tokens=60, seed=0)
        running = asyncio.create_task(engine.generate(PROMPTS[0], sampling, 4))
        await asyncio.sleep(0.02)
        pull = asyncio.create_task(_pull(engine, store, 4))
        await asyncio.sleep(0)
        later = asyncio.create_task(engine.generate(PROMPTS[0], sampling, 4))
        await pull
        assert {v for c in await running for v in c.versions} == {0}
        assert {v for c in await later for v in c.versions} == {4}
        assert [c.tokens for c in await later] != [c.tokens for c in await running]

    asyncio.run(main())


def test_what_does_not_fit_leaves_the_old_weights(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32")
    weights = _moved(directory, 1)
    norm = "model.norm.weight"
    wrong: list[tuple[torch.dtype, Mapping[str, torch.Tensor], str]] = [
        (torch.bfloat16, weights, r"published as torch\.bfloat16; this generator holds torch\.float32"),
        (torch.float32, {n: t for n, t in weights.items() if n != norm}, r"missing: model\.norm\.weight"),
        (torch.float32, {**weights, "lm_head.weight": torch.zeros(64, 128)}, r"not of this model: lm_head\.weight"),
        (torch.float32, {**weights, norm: torch.zeros(64)}, r"of another shape: .*norm\.weight \(64,\) instead of"),
    ]

    async def main() -> None:
        before = await _greedy(engine)
        for dtype, tensors, message in wrong:
            store = FakeStore()
            await WeightPublisher(dtype, store=store).publish(1, tensors.items())
            with pytest.raises(WeightsMismatchError, match=message):
                await _pull(engine, store, 1)
        assert engine.version == 0
        assert await _greedy(engine) == before

    asyncio.run(main())


def test_versions_that_are_gone_are_refused_by_name(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    async def main() -> None:
        with pytest.raises(UnknownVersionError, match="nothing was pushed yet"):
            await _pull(engine, store, 1)
        for version in (1, 2):
            await publisher.publish(version, _moved(directory, version).items())
        stale = await find_record(store, 1)
        await _pull(engine, store, 1)  # the one before the newest is still whole
        before = await _greedy(engine)
        await publisher.publish(3, _moved(directory, 3).items())
        with pytest.raises(UnknownVersionError, match="versions that can: 2, 3"):
            await _pull(engine, store, 1)
        with pytest.raises(UnknownVersionError, match="its slot holds version 3 by now"):
            await engine.update_weights(stale, store)
        assert engine.version == 1
        assert await _greedy(engine) == before

    asyncio.run(main())


def test_half_loaded_weights_are_never_sampled_from(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, "torchstore", store=store)

    async def main() -> None:
        for version in (1, 2):
            await publisher.publish(version, _moved(directory, version).items())
        lost = (await find_record(store, 2)).key("model.norm.weight")
        del store.values[lost]
        with pytest.raises(KeyError, match="Unable to locate"):
            await _pull(engine, store, 2)
        with pytest.raises(WeightsError, match="incomplete since a failed update"):
            await engine.generate(PROMPTS[0], GREEDY)
        await _pull(engine, store, 1)
        assert {v for c in await _greedy(engine) for v in c.versions} == {1}

    asyncio.run(main())


def test_weights_of_another_host_name_the_transport_that_reaches_it(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()

    async def main() -> None:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("trainer.weights.host_identity", lambda: "another host")
            await WeightPublisher(torch.float32, store=store).publish(1, _moved(directory, 1).items())
        assert store.values[INDEX_KEY][0].host == "another host"
        with pytest.raises(ValueError, match="publish with transport='torchstore'"):
            await _pull(engine, store, 1)

    asyncio.run(main())
