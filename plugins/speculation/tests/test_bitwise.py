"""With `numerics` "bitwise", drafts change no bit of any log-prob, in bfloat16 either."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from generator.config import Speculation
from generator.engine import GenerationEngine
from ownloop_speculation.history import History
from plugins.speculation.tests.drafting import Wild, draft_always
from plugins.speculation.tests.test_drafted_rollouts import CUTS, PROMPT
from rl.tiny_models import SERVABLE, tiny_dense
from rl.types import Completion, SamplingParams
from tests.generator.engines import EngineFactory

pytestmark = pytest.mark.vllm


def sample(engine: GenerationEngine) -> list[list[Completion]]:
    """Requests of all kinds in one batch."""

    async def main() -> list[list[Completion]]:
        kinds = [SamplingParams(max_tokens=30, seed=9 + i, **options) for i, options in enumerate(CUTS.values())]
        return await asyncio.gather(*(engine.generate(PROMPT[: 6 + i], kind, 3) for i, kind in enumerate(kinds)))

    return asyncio.run(main())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probs_with_drafts_are_equal_to_the_bit(dtype: Any, tmp_path: Path, build_engine: EngineFactory) -> None:
    shape: dict[str, Any] = {**SERVABLE, "initializer_range": 0.25}
    model = tiny_dense("qwen3", tmp_path / "model", **shape)
    plain = build_engine(model, dtype, numerics="bitwise", max_num_seqs=16)
    expected = sample(plain)
    speculation = Speculation(min_chance=0.0)
    drafting = build_engine(model, dtype, numerics="bitwise", max_num_seqs=16, speculation=speculation)
    for history in (History, Wild):
        draft_always(drafting, history)
        sample(drafting)
        drafting.load.take()
        assert sample(drafting) == expected
        load = drafting.load.take()
        assert load["engine_draft_tokens"] > load["engine_accepted_tokens"] > 100
