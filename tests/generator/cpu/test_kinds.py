"""Covers generator/cpu/weight_packing.py: pulls on every kind of CPU that this machine can pretend to be.

Kinds of CPU differ in the kernels and in the packed form of weights that vLLM chooses for a layer. Other tests of pulls
see the machine's own kind only.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.utils as gemm
from torch import nn

from generator.config import LoRALimits
from generator.cpu.patches import patch_cpu
from generator.cpu.weight_packing import packed_in_place, plain_convolutions
from generator.engine import GenerationEngine
from rl.lora import LoRAConfig
from rl.system.hardware import cpu_features
from rl.types import Completion, SamplingParams
from tests.generator.adapted import largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import PROMPTS, export, moved, pull
from tests.generator.served_models import served_llama, served_qwen2, served_qwen3
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

CAP = "ONEDNN_MAX_CPU_ISA"
KINDS = {
    "AVX2": ("avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "AVX512_CORE": ("avx512f", {}),
    "AVX512_CORE_BF16": ("avx512_bf16", {}),
    "AVX512_CORE_AMX": ("amx_bf16", {}),
}
"""Values of oneDNN's cap, the instructions that each allows at most, and what else such a processor would have set."""
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "plain": (partial(served_llama, tied=False), {}),
    "tied": (partial(served_qwen3, tied=True), {}),
    "biased": (partial(served_qwen2, tied=False), {}),
    "biased-tied": (partial(served_qwen2, tied=True), {}),
    "float32-head": (partial(served_llama, tied=False), {"head_dtype": "float32"}),
    "float32-head-tied": (partial(served_qwen3, tied=True), {"head_dtype": "float32"}),
    "adapted": (partial(served_qwen2, tied=False), {"lora": LoRALimits(max_rank=8, max_adapters=1, max_loaded=1)}),
}
ADAPTER = LoRAConfig(rank=4, alpha=8.0)
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(autouse=True)
def pretended_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has vLLM, which asks PyTorch, see no more of the processor than oneDNN does."""
    kinds, cap = list(KINDS), os.environ.get(CAP, "")
    if cap in kinds[:2]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


async def _sample(engine: GenerationEngine, directory: Path, dtype: torch.dtype, *, adapted: bool) -> list[Completion]:
    """Greedy samples, of a new version of an adapter too where there is room for one."""
    found = [(await engine.generate(prompt, GREEDY))[0] for prompt in PROMPTS]
    if adapted:
        await pull_adapter(engine, "a", 1, random_adapter(directory, 1, ADAPTER), ADAPTER, dtype=dtype)
        found += [(await engine.generate(prompt, GREEDY, policy="a"))[0] for prompt in PROMPTS]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_pulls_equal_a_fresh_engine(tmp_path: Path, build_engine: EngineFactory, case: str, dtype: torch.dtype) -> None:
    assert_pulls_equal_a_fresh_engine(tmp_path, build_engine, *CASES[case], dtype)


def assert_pulls_equal_a_fresh_engine(
    tmp_path: Path, build_engine: EngineFactory, write: Callable[[Path], Path], options: Any, dtype: torch.dtype
) -> None:
    """Samples after three pulls are those of an engine that loads the same weights."""
    directory, name, adapted = write(tmp_path / "model"), str(dtype).removeprefix("torch."), "lora" in options
    store = FakeStore()
    publisher = WeightPublisher(dtype, store=store)

    async def main() -> None:
        engine = build_engine(directory, name, **options)
        before = [(await engine.generate(prompt, GREEDY))[0] for prompt in PROMPTS]
        for version in (1, 2, 3):
            await publisher.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
        after = await _sample(engine, directory, dtype, adapted=adapted)
        assert [c.logprobs for c in after[: len(before)]] != [c.logprobs for c in before]
        exported = export(directory, moved(directory, 3), dtype, tmp_path / "exported")
        fresh = await _sample(build_engine(exported, name, **options), directory, dtype, adapted=adapted)
        assert [c.logprobs for c in after] == [c.logprobs for c in fresh]
        if dtype == torch.float32:  # and what a fresh engine computes is right
            model = merged(exported, {})
            assert all(largest_error(model, p, c) < 5e-5 for p, c in zip(PROMPTS, after, strict=False))

    asyncio.run(main())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_are_plain_or_packed_again(dtype: torch.dtype) -> None:
    patch_cpu()
    old, new = (torch.randn(64, 1, 4).to(dtype) for _ in range(2))
    pulled, fresh = (nn.Conv1d(64, 64, 4, groups=64, bias=False, dtype=dtype) for _ in range(2))
    for layer, weight in ((pulled, old), (fresh, new)):
        layer.requires_grad_(requires_grad=False)
        layer.weight.data = weight.clone()
        gemm.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    with plain_convolutions(pulled):
        assert pulled.weight.shape == new.shape
        pulled.weight.data.copy_(new)
    for pack in packed_in_place(pulled):
        pack()
    assert torch.equal(pulled.weight, fresh.weight)
    packs = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    assert packs or torch.equal(pulled.weight, new)


@pytest.mark.slow
@pytest.mark.parametrize("cap", KINDS)
def test_pulls_equal_a_fresh_engine_on(cap: str) -> None:
    assert_passes_on(cap, __file__, 2 * len(CASES) + 2)


def assert_passes_on(cap: str, file: str, num_tests: int) -> None:
    """The tests of a file pass where oneDNN and vLLM see such a processor."""
    flag, environment = KINDS[cap]
    if flag not in cpu_features():
        pytest.skip(f"hardware: this CPU has no {flag}, so it cannot pretend to be {cap}")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command, env={**os.environ, **environment, CAP: cap}, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{num_tests} passed" in done.stdout
