"""The engine of a tiny chat model, as for agents."""

from plugins.agents.tests.conftest import chat_engine
from tests.generator.conftest import build_engine

__all__ = ["build_engine", "chat_engine"]
