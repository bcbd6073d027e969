"""Engines that always draft. As a plug-in of pytest it has every engine draft, so that other tests run with drafts:

    pytest -p plugins.speculation.tests.drafting tests/generator/test_live_updates.py

DRAFTS in the environment is "history", or "wild" for drafts of random tokens and lengths.
"""

import os
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine.llm_engine import LLMEngine

from generator.config import GeneratorConfig, Speculation
from generator.engine import GenerationEngine
from ownloop_speculation.drafter import Drafter
from ownloop_speculation.history import Draft, History
from ownloop_speculation.parts import HistoryDrafts
from ownloop_speculation.rule import DraftRule


class Always(DraftRule):
    """Drafts all that the history has: whether it pays is not what is tested."""

    def least_chance(self, running: int) -> float:
        return 0.0

    def choose(self, chances: Sequence[Sequence[float]], most: int) -> list[int]:
        return [len(each) for each in chances]

    def is_worth_a_look(self, running: int) -> bool:
        return True


class Never(DraftRule):
    """Drafts nothing."""

    def is_worth_a_look(self, running: int) -> bool:
        return False


class Wild(History):
    """Drafts of random tokens and random lengths, some with a beginning from the history."""

    chosen = random.Random(0)

    def draft(self, request: str, most: int, least: float) -> Draft:
        draft = super().draft(request, most, least)
        if self.chosen.random() < 0.7:
            size = self.chosen.randrange(9)
            draft.tokens[self.chosen.randrange(3) :] = [self.chosen.randrange(3, 40) for _ in range(size)]
        tokens = draft.tokens[:most]
        return Draft(tokens, [1.0] * len(tokens))


def drafter_of(engine: GenerationEngine) -> Drafter:
    """What drafts for this engine."""
    runner: Any = engine.llm.model_executor.driver_worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(runner, "drafter", None)  # pyright: ignore[reportReturnType]


def draft_always(engine: GenerationEngine, history: type[History] = History) -> Drafter:
    """Has an engine with `speculation` draft wherever it can."""
    drafter = drafter_of(engine)
    drafter.rule, drafter.history = Always(), history(max_tokens=1 << 20)
    return drafter


class AlwaysDrafts(HistoryDrafts):
    """A part for engines in processes of their own."""

    def after_build(self, engine: LLMEngine) -> None:
        super().after_build(engine)
        self._drafter.rule = Always()


@pytest.fixture(scope="session", autouse=True)
def every_engine_drafts() -> Generator[None]:
    """Gives every engine that can have them drafts, and says at the end how many there were."""
    counts, init, close = Counter[str](), GenerationEngine.__init__, GenerationEngine.close
    history = Wild if os.environ.get("DRAFTS") == "wild" else History

    def with_drafts(self: GenerationEngine, config: GeneratorConfig) -> None:
        drafting = replace(config, speculation=Speculation(min_chance=0.0))
        try:
            HistoryDrafts(drafting, has_gpu=False).check()
        except ValueError:
            init(self, config)
        else:
            init(self, drafting)
            draft_always(self, history)

    def closed(self: GenerationEngine) -> None:
        close(self)
        if hasattr(drafter_of(self), "take_metrics"):
            counts.update({"engines": 1, **{name: int(n) for name, n in drafter_of(self).take_metrics().items()}})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationEngine, "__init__", with_drafts)
        patch.setattr(GenerationEngine, "close", closed)
        yield
    print(f"\ndrafting: {dict(counts)}")
