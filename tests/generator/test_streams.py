"""Requests whose outputs come one by one, against the same requests as a whole."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from generator.engine import GenerationEngine
from rl.types import SamplingParams
from tests.generator.engines import EngineFactory
from tests.generator.served_models import served_llama
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.paced]
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, build_engine: EngineFactory) -> GenerationEngine:
    return build_engine(served_llama(tmp_path_factory.mktemp("streams") / "model", tied=True), "float32")


def _params(max_tokens: int, **options: Any) -> Any:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, ignore_eos=True, **options)


async def _tokens(engine: GenerationEngine, max_tokens: int, **options: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for output in engine.stream(PROMPT, _params(max_tokens, **options)):
        for sample in output.outputs:
            found.setdefault(sample.index, []).extend(sample.token_ids)
    return found


async def test_a_stream_beside_other_requests_has_all_tokens(engine: GenerationEngine) -> None:
    sampling = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    whole, streamed, greedy = await asyncio.gather(
        engine.generate(PROMPT, sampling, 2), _tokens(engine, 12, seed=3, n=2), _tokens(engine, 5, temperature=0)
    )
    assert [tuple(streamed[index]) for index in range(2)] == [completion.tokens for completion in whole]
    assert len(greedy[0]) == 5
    unseeded = await asyncio.gather(*(_tokens(engine, 12) for _ in range(2)))
    assert unseeded[0] != unseeded[1]


async def test_a_stream_that_nobody_reads_on_frees_its_place(engine: GenerationEngine) -> None:
    async with aclosing(engine.stream(PROMPT, _params(100))) as outputs:
        async for output in outputs:
            assert not output.finished
            break
        assert engine.num_unfinished == 1
    await until(lambda: not engine.num_unfinished, "the request to be gone")
    assert len((await _tokens(engine, 3))[0]) == 3


async def test_what_cannot_be_streamed_harms_no_later_stream(engine: GenerationEngine) -> None:
    async def failing(prompt: list[int], policy: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            await anext(engine.stream(prompt, _params(3), policy=policy))

    await failing(PROMPT * 20, None, "128")
    assert len((await _tokens(engine, 3))[0]) == 3
