"""Pulls of a mixture on every kind of CPU that this machine can pretend to be, as tests/generator/cpu/test_kinds.py."""

from pathlib import Path

import pytest
import torch

from tests.generator.cpu.test_kinds import KINDS, assert_passes_on, assert_pulls_equal_a_fresh_engine
from tests.generator.engines import EngineFactory
from tests.generator.served_models import served_qwen3_moe

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_pulls_of_experts_equal_a_fresh_engine(tmp_path: Path, build_engine: EngineFactory, dtype: torch.dtype) -> None:
    assert_pulls_equal_a_fresh_engine(tmp_path, build_engine, served_qwen3_moe, {}, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("cap", KINDS)
def test_pulls_of_experts_equal_a_fresh_engine_on(cap: str) -> None:
    assert_passes_on(cap, __file__, 2)
