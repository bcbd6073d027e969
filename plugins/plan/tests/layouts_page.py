"""Writes the table of the page layouts.md from what checks accept: `python -m plugins.plan.tests.layouts_page`."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ownloop_families.tiny import TINY_FAMILIES
from ownloop_vision.tiny_vl import tiny_gemma3, tiny_qwen2_5_vl, tiny_qwen3_vl
from rl.lora import LoRAConfig
from rl.system.decoders import DENSE
from rl.tiny_models import SERVABLE, tiny_dense
from tests.docs.pages import ROOT
from trainer.config import TrainerConfig
from trainer.engines.model_check import check_model

PAGE = ROOT / "plugins" / "plan" / "docs" / "layouts.md"
ENGINES = ("torchtitan", "fsdp2", "fsdp1", "megatron", "bitwise")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "FSDP": {"data_parallel_shard": 2},
    "HSDP": {"data_parallel_shard": 2, "data_parallel_replicate": 2},
    "TP": {"tensor_parallel": 2},
    "TP x EP": {"tensor_parallel": 2, "expert_parallel": 2},
    "EP": {"data_parallel_shard": 2, "expert_parallel": 2},
    "CP": {"context_parallel": 2},
    "PP": {"pipeline_parallel": 2},
    "LoRA": {"lora": LoRAConfig(rank=4)},
    "critic": {"head": "value"},
}
MODELS: Mapping[str, Callable[[Path], Path]] = {
    **{row.architecture: partial(tiny_dense, row.name, tied=False, **SERVABLE) for row in DENSE},
    **dict(TINY_FAMILIES.values()),
    "Qwen3VLForConditionalGeneration": partial(tiny_qwen3_vl, words=["red"], num_key_value_heads=2),
    "Qwen2_5_VLForConditionalGeneration": partial(tiny_qwen2_5_vl, words=["red"], num_key_value_heads=2),
    "Gemma3ForConditionalGeneration": partial(tiny_gemma3, words=["red"], num_key_value_heads=2),
}
"""Architecture -> what writes a tiny model whose sizes two ranks can divide, and whose embeddings are not tied."""


def accepted(model: Path, engine: str) -> str:
    """The ways in which an engine trains a model, or a dash."""
    ways = [
        way for way, options in WAYS.items() if any(_accepts(model, engine, options, each) for each in (True, False))
    ]
    return ", ".join(ways) or "-"


def _accepts(model: Path, engine: str, options: Mapping[str, Any], sequence_parallel: bool) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an architecture that no test covers
        try:
            check_model(TrainerConfig(model=model, engine=engine, sequence_parallel=sequence_parallel, **options))
        except (ValueError, UserWarning):
            return False
    return True


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| `architectures` | " + " | ".join(ENGINES) + " |"
    yield "|---|" + "---|" * len(ENGINES)
    with tempfile.TemporaryDirectory() as folder:
        for architecture, make in MODELS.items():
            model = make(Path(folder) / architecture)
            yield f"| `{architecture}` | " + " | ".join(accepted(model, engine) for engine in ENGINES) + " |"


def table_of_the_page() -> list[str]:
    """The lines of the page's first table as they are written."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n\n")
    return rest.partition("\n\n")[0].splitlines()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace("\n".join(table_of_the_page()), "\n".join(table())), encoding="utf-8")
