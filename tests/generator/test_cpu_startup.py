"""An engine on the CPU starts without what it never uses."""

import asyncio
import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from generator._cpu_packing import packed_layers
from generator._cpu_startup import patch_startup, without_compiler
from tests.generator.conftest import EngineFactory
from tests.generator.published import greedy
from tests.generator.served_models import served_llama

COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.symbolic_convert", "sympy")
START = """
import asyncio
import sys
from pathlib import Path
from rl.deferred_imports import defer_compiler
defer_compiler()
from generator.actor import VLLMGenerator
from generator.config import GeneratorConfig
from rl.types import SamplingParams
generator = VLLMGenerator(GeneratorConfig(model=Path(sys.argv[1]), dtype="float32", max_model_len=64))
asyncio.run(generator._engine.generate((1, 2, 3), SamplingParams(max_tokens=4), 2))
print(*sorted(set(sys.argv[2:]) & set(sys.modules)))
generator._engine.close()
import vllm.env_override
import vllm.model_executor.warmup.kernel_warmup as warmups
import vllm.v1.worker.gpu.warmup
assert vllm.env_override._patch_inductor_fallback_allow_list
assert warmups.kernel_warmup is not None
"""


def test_functions_that_are_marked_for_the_compiler_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.env_override", raising=False)
    compiler: Any = torch.compile

    def double(x: int) -> int:
        return 2 * x

    with without_compiler():
        assert torch.compile(double) is double
        assert torch.compile(dynamic=True)(double) is double
        assert "vllm.env_override" in sys.modules
    assert torch.compile is compiler
    assert "vllm.env_override" not in sys.modules


def test_patches_of_the_compiler_that_are_there_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.env_override", copy)
    with pytest.raises(KeyError), without_compiler():
        raise KeyError
    assert sys.modules["vllm.env_override"] is copy


@pytest.mark.vllm
def test_triton_kernels_are_replaced_wherever_something_refers_to_them(
    build_engine: EngineFactory, tmp_path: Path
) -> None:
    build_engine(served_llama(tmp_path / "model", tied=True), "float32").close()
    from vllm.triton_utils import dispatcher

    kernels: Any = dispatcher
    originals = [original for original, _ in kernels._registry.values()]
    assert originals
    assert kernels.sys is sys
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()):
            assert not any(value is original for original in originals), name


@pytest.mark.vllm
def test_references_to_a_kernel_are_looked_for_in_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils import dispatcher

    patch_startup()
    kernels: Any = dispatcher
    original, wrapper = object(), object()
    for name in ("vllm.holder.of_a_kernel", "holder.of_a_kernel"):
        holder = ModuleType(name)
        setattr(holder, "kernel", original)  # noqa: B010
        monkeypatch.setitem(sys.modules, name, holder)
    kernels._rebind_kernels([(original, wrapper)])
    assert vars(sys.modules["vllm.holder.of_a_kernel"])["kernel"] is wrapper
    assert vars(sys.modules["holder.of_a_kernel"])["kernel"] is original
    assert kernels.sys is sys


@pytest.mark.vllm
def test_tokenizers_are_copied_for_threads_that_use_them(
    build_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []
    original = copy.deepcopy

    def counted(value: Any, memo: Any = None) -> Any:
        copied.append(value)
        return original(value, memo)

    from vllm.tokenizers import hf

    monkeypatch.setattr(hf, "copy", type("Copying", (), {"copy": copy.copy, "deepcopy": staticmethod(counted)}))
    engine = build_engine(served_llama(tmp_path / "model", tied=True), "float32")
    assert not copied
    tokenizer: Any = engine.llm.renderer.tokenizer
    with ThreadPoolExecutor(4) as threads:
        encoded = list(threads.map(tokenizer.encode, ["w3 w5 w8"] * 100))
    assert encoded == [encoded[0]] * 100
    assert len(encoded[0]) == 3
    assert 1 <= len(copied) <= 4


@pytest.mark.slow
def test_a_generator_starts_without_the_compiler(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    command = [sys.executable, "-c", START, str(model), *COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == ""


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
