"""Patches of vLLM on the CPU: a KV cache that takes memory as it fills."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from generator.cpu.patches import patch_cpu
from tests.generator.engines import EngineFactory
from tests.generator.served_models import served_llama

pytestmark = pytest.mark.vllm

NUM_BYTES = 1 << 29


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_vllm_allocates_a_cache_that_nobody_has_written_to(
    build_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.v1.worker.gpu_model_runner as model_runner  # loads vLLM, which a worker without these tests need not do

    allocated: list[dict[str, torch.Tensor]] = []
    model = served_llama(tmp_path / "model", tied=True)
    build_engine(model, "float32").close()  # so vLLM is patched
    patched: Any = model_runner.allocate_kv_cache
    original = patched._original

    def larger(config: Any, *args: Any) -> dict[str, torch.Tensor]:
        """What vLLM is asked for, in a buffer of half a gigabyte."""
        for tensor in config.kv_cache_tensors:
            object.__setattr__(tensor, "size", NUM_BYTES)
        before = _resident_bytes()
        allocated.append(original(config, *args))
        assert _resident_bytes() - before < NUM_BYTES / 8
        return allocated[-1]

    monkeypatch.setattr(patched, "_original", larger)
    build_engine(model, "float32").close()
    (views,) = allocated
    assert {view.untyped_storage().nbytes() for view in views.values()} == {NUM_BYTES}
    assert all(not view.any() for view in views.values())


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_rotated_heads_are_those_of_pytorch(is_neox_style: bool) -> None:
    """vLLM's own kernel rotates pairs of neighbours in the first head only."""
    patch_cpu()
    with set_current_vllm_config(VllmConfig()):
        rotate = RotaryEmbedding(64, 64, 32, 10000.0, is_neox_style, torch.float32)
    query, key, positions = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.arange(9)
    expected = RotaryEmbedding.forward_native(rotate, positions, query.clone(), key.clone())
    found = rotate(positions, query.clone(), key.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
