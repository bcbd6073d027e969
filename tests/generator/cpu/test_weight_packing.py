"""Packed copies of matrices against PyTorch's product, whatever their rows' distance and whoever packed them."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops

from generator.cpu import weight_packing
from generator.cpu.weight_packing import packed_layers, patch_packing
from rl.system.hardware import has_fast_bfloat16
from rl.weights.version import WeightsError
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS, export, greedy, moved, pull
from tests.generator.served_models import served_llama
from tests.stores import FakeStore
from tests.waiting import join
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

SHAPES = [(64, 64), (96, 512), (640, 1024), (100, 1000), (33, 31)]
"""Rows of 31 to 1,024 numbers: with and without conflicts, of whole cache lines and not."""
DTYPES = [torch.float32, *([torch.bfloat16] if has_fast_bfloat16() else [])]


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "create_onednn_mm", ops.create_onednn_mm)
    patch_packing()
    patch_packing()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scratch_bytes", [0, 1 << 20])
def test_every_packed_matrix_multiplies_as_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scratch_bytes: int
) -> None:
    """All are packed before any is multiplied with, from memory that is overwritten each time."""
    monkeypatch.setattr(weight_packing, "_CACHED_BYTES", scratch_bytes)
    monkeypatch.setattr(weight_packing, "_SCRATCH_BYTES", scratch_bytes)
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) for shape in (*SHAPES, *SHAPES[::-1])]
    packed = [ops.create_onednn_mm(weight.t(), 32) for weight in weights]
    for weight, handler in zip(weights, packed, strict=True):
        hidden = torch.randn(5, weight.shape[1]).to(dtype)
        actual = ops.onednn_mm(handler, hidden, None)
        expected = (hidden.double() @ weight.double().t()).to(dtype)
        torch.testing.assert_close(actual, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_rows_handed_over_are_an_odd_number_of_lines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    pack = weight_packing._PackFromCache(given.append)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(weight_packing, "_CACHED_BYTES", 100_000)
    monkeypatch.setattr(weight_packing, "_SCRATCH_BYTES", 300_000)
    staged, large, conflicting, too_large = (
        torch.randn(shape) for shape in ((8, 96), (100, 320), (100, 512), (200, 512))
    )
    for weight, rows_apart in ((staged, 7), (large, 20), (conflicting, 33), (too_large, 32)):
        pack(weight.t())
        assert torch.equal(given[-1], weight.t())
        assert given[-1].stride() == (1, rows_apart * 16)


def test_a_matrix_may_first_be_packed_in_a_forward_pass() -> None:
    """vLLM's are in inference mode, pulls are not, and vLLM takes its slow way when packing raises."""
    weights = [torch.randn(64, 64) for _ in range(2)]
    with torch.inference_mode():
        packed = [ops.create_onednn_mm(weights[0].t(), 32)]
    packed.append(ops.create_onednn_mm(weights[1].t(), 32))
    hidden = torch.randn(3, 64)
    for handler, weight in zip(packed, weights, strict=True):
        torch.testing.assert_close(ops.onednn_mm(handler, hidden, None), hidden @ weight.t(), rtol=1e-4, atol=1e-3)


def test_threads_pack_side_by_side() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(256, 256) for _ in range(40)]
    packed: dict[int, ops.CPUDNNLGEMMHandler] = {}

    def work(first: int) -> None:
        for index in range(first, len(weights), 2):
            packed[index] = ops.create_onednn_mm(weights[index].t(), 32)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    join(*threads)
    hidden = torch.randn(3, 256)
    for index, weight in enumerate(weights):
        torch.testing.assert_close(
            ops.onednn_mm(packed[index], hidden, None), hidden @ weight.t(), rtol=1e-4, atol=1e-3
        )


async def test_a_weight_that_cannot_be_packed_again_is_an_error(
    tmp_path: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would multiply with the plain weight, which a pull that packs from published memory leaves out of date."""
    directory = served_llama(tmp_path / "model", tied=True)
    engine, store = build_engine(directory, "float32"), FakeStore()
    publisher = WeightPublisher(torch.float32, store=store)

    for version in (1, 2, 3):
        await publisher.publish(version, moved(directory, version).items())
        if version < 3:
            await pull(engine, store, version)
    with monkeypatch.context() as no_packing:
        no_packing.setattr(ops, "create_onednn_mm", _refuse)
        with pytest.raises(WeightsError, match=r"vLLM could not pack a weight of \d+x\d+ again"):
            await pull(engine, store, 3)
    with pytest.raises(WeightsError, match="incomplete since a failed update"):
        await engine.generate(PROMPTS[0], GREEDY)
    await pull(engine, store, 3)
    fresh = build_engine(export(directory, moved(directory, 3), torch.float32, tmp_path / "exported"), "float32")
    assert [c.logprobs for c in await greedy(engine)] == [c.logprobs for c in await greedy(fresh)]


def _refuse(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_nothing_is_packed_before_it_is_multiplied_with(tmp_path: Path, build_engine: EngineFactory) -> None:
    """A run's first pull would pack the same again."""
    engine = build_engine(served_llama(tmp_path / "model", tied=True), "float32")
    worker: Any = engine.llm.model_executor.driver_worker  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    layers = packed_layers(worker.get_model())
    before = [vars(layer)["cpu_linear"] for layer in layers]
    asyncio.run(greedy(engine))
    assert before
    assert packed_layers(worker.get_model()) == layers
    assert not any(vars(layer)["cpu_linear"] is old for layer, old in zip(layers, before, strict=True))
