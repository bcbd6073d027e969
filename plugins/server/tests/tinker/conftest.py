"""One server of SmolLM2 for all recipes that are run one after the other."""

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from ownloop_server.child_server import Server, served
from plugins.server.tests.tinker.datasets_here import HUB_MODEL
from rl.tiny_models import SERVABLE, tiny_llama

FLOAT32 = ("--trainer.compute-dtype", "float32", "--generator.dtype", "float32")


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server of SmolLM2; with OWNLOOP_TINY_RECIPES=1 of a tiny model, on which recipes run but do not learn."""
    folder = tmp_path_factory.mktemp("server")
    model = tiny_chat_model(folder / "model", smollm2) if "OWNLOOP_TINY_RECIPES" in os.environ else smollm2
    threads = ("--trainer.num-threads", "2", "--generator.num-threads", "2")
    with served(
        model, folder, *FLOAT32, *threads, "--names", HUB_MODEL, "--generator.max-model-len", "1024"
    ) as running:
        yield running


def tiny_chat_model(folder: Path, smollm2: Path) -> Path:
    """A tiny random model with the tokenizer of SmolLM2."""
    model = tiny_llama(folder, **SERVABLE, vocab_size=49152, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, model / name)
    return model


def learns() -> bool:
    """Whether the served model is one that learns, so that metrics may be compared."""
    return "OWNLOOP_TINY_RECIPES" not in os.environ
