"""vLLM engines in the test's own process: importing vLLM takes seconds, a further engine a fraction of one."""

import gc
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.config import GeneratorConfig
from generator.engine import GenerationEngine
from generator.options import generator_env

EngineFactory = Callable[..., GenerationEngine]


@pytest.fixture(scope="module")
def build_engine() -> Generator[EngineFactory]:
    """Builds an engine for a model directory; all end with the module, and what vLLM did to this process is undone."""
    from vllm.distributed import cleanup_dist_env_and_memory

    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    engines: list[GenerationEngine] = []

    def build(directory: Path, dtype: str, **options: Any) -> GenerationEngine:
        options = {"max_model_len": 128, "max_num_seqs": 8, **options}
        config = GeneratorConfig(model=directory, dtype=dtype, **options)  # pyright: ignore[reportArgumentType]
        os.environ.update(generator_env(config))
        engines.append(GenerationEngine(config))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)  # vLLM does so once per engine, seconds each with its modules loaded
        engines.clear()
    cleanup_dist_env_and_memory()
    torch.set_num_threads = set_num_threads
    os.environ.clear()
    os.environ.update(environment)
