"""SmolLM2 in float32, with drafts of two sources, good, poor and absent: no token and no kept set differs.

What is sampled without drafts has transformers' log-probs.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller.runs.models import resolve_model
from generator.config import Speculation
from generator.engine import GenerationEngine
from ownloop_speculation.history import History
from plugins.speculation.tests.drafting import Never, Wild, draft_always
from plugins.speculation.tests.test_drafted_rollouts import CUTS, assert_right, assert_same
from rl.types import Completion, SamplingParams
from tests.generator.engines import EngineFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORDS = (3290, 253, 3290, 284, 253, 2644, 732, 253, 3290, 284)  # its end repeats, so that there are drafts
KINDS: dict[str, dict[str, Any]] = {
    **CUTS,
    "stops": {"stop_token_ids": (28, 30), "stop": (" and", "\n"), "prompt_logprobs": True},
}
NUM_SAMPLES, MAX_TOKENS = 3, 20


def sample(engine: GenerationEngine) -> dict[str, list[Completion]]:
    """Completions of every kind of sampling, all in one batch."""

    async def main() -> list[list[Completion]]:
        kinds = [SamplingParams(max_tokens=MAX_TOKENS, seed=5 + i, **each) for i, each in enumerate(KINDS.values())]
        return await asyncio.gather(*(engine.generate(WORDS, kind, NUM_SAMPLES) for kind in kinds))

    return dict(zip(KINDS, asyncio.run(main()), strict=True))


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def expected(model: Path, build_engine: EngineFactory) -> dict[str, list[Completion]]:
    engine = build_engine(model, "float32", max_num_seqs=32)
    found = sample(engine)
    engine.close()
    for name, completions in found.items():
        for each in completions:
            assert_right(model, WORDS, each, SamplingParams(max_tokens=MAX_TOKENS, **KINDS[name]))
    return found


@pytest.mark.parametrize("source", ["history", "ngram"])
def test_drafts_change_no_token_and_no_kept_set(
    model: Path, expected: dict[str, list[Completion]], build_engine: EngineFactory, source: str
) -> None:
    speculation = Speculation(source=source, min_chance=0.0)
    engine = build_engine(model, "float32", max_num_seqs=32, speculation=speculation)
    for name, history in {"good": History, "poor": Wild, "absent": History}.items():
        drafter = draft_always(engine)
        drafter.history = history(max_tokens=1 << 20, own_only=source == "ngram")
        drafter.rule = Never() if name == "absent" else drafter.rule
        engine.load.take()
        for _ in range(2 if (source, name) == ("history", "good") else 1):  # the second time, it knows the answers
            found = sample(engine)
            for kind, completions in found.items():
                assert_same(completions, expected[kind])
        load = engine.load.take()
        assert (load["engine_draft_tokens"] > 0) == (name != "absent")
        if (source, name) == ("history", "good"):
            assert load["engine_accepted_tokens"] > 200
    engine.close()
