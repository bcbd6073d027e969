"""Patches of vLLM on the CPU: a KV cache that takes memory as it fills.

Covers: generator/cpu/patches.py
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generator.conftest import EngineFactory
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
