"""The engine of a tiny chat model, in the test's own process."""

from typing import TYPE_CHECKING

import pytest

from plugins.agents.tests.chatting import chat_model
from tests.generator.engines import EngineFactory

if TYPE_CHECKING:  # the import would load vLLM
    from generator.engine import GenerationEngine


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory: pytest.TempPathFactory, build_engine: EngineFactory) -> "GenerationEngine":
    """Answers with random characters."""
    model = chat_model(tmp_path_factory.mktemp("chat") / "model")
    return build_engine(model, "float32", max_model_len=4096, max_num_seqs=16)
