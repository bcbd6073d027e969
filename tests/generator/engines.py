"""vLLM engines in the test's own process: importing vLLM takes seconds, a further engine a fraction of one."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.config import GeneratorConfig
from generator.options import generator_env
from tests.meshes_in_process import vllm_in_process

if TYPE_CHECKING:
    from generator.engine import GenerationEngine

EngineFactory = Callable[..., "GenerationEngine"]


def engine_factory() -> Generator[EngineFactory]:
    """Yields a function that builds an engine for a model directory; all end with the generator."""
    from generator.engine import GenerationEngine

    engines: list[GenerationEngine] = []

    def build(directory: Path, dtype: str, **options: Any) -> GenerationEngine:
        options = {"max_model_len": 128, "max_num_seqs": 8, **options}
        config = GeneratorConfig(model=directory, dtype=dtype, **options)  # pyright: ignore[reportArgumentType]
        os.environ.update(generator_env(config))
        engines.append(GenerationEngine(config))
        return engines[-1]

    with vllm_in_process():
        yield build
        for engine in engines:
            engine.close()
        engines.clear()
