"""What is sampled, with which log-probs, against transformers and plain softmax."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from generator.engine import GenerationEngine
from generator.engine_calls import EngineStatus, EngineStoppedError
from rl.types import Completion, SamplingParams
from tests.generator.engines import EngineFactory
from tests.generator.running import started
from tests.generator.served_models import served_llama
from tests.waiting import until, wait_until

pytestmark = pytest.mark.vllm

PROMPT = list(range(3, 40))
SHORT = list(range(20, 5, -1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_llama(tmp_path_factory.mktemp("engine") / "model", tied=True)


@pytest.fixture(scope="module")
def engine(build_engine: EngineFactory, model: Path) -> GenerationEngine:
    return build_engine(model, "float32")


def _generate(
    engine: GenerationEngine, prompt: Sequence[int], sampling: SamplingParams, num_samples: int = 1
) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, sampling, num_samples))


def _reference_logprobs(
    model: Path, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[N, V] log-probs of the next token at each position of the completion, by transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_greedy_tokens_and_logprobs_are_those_of_transformers(engine: GenerationEngine, model: Path) -> None:
    for prompt in (PROMPT, SHORT):
        (completion,) = _generate(engine, prompt, SamplingParams(max_tokens=30, temperature=0))
        expected = _reference_logprobs(model, prompt, completion.tokens)
        assert completion.tokens == tuple(expected.argmax(-1).tolist())
        chosen = expected[range(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)


def test_greedy_samples_of_one_call_are_equal(engine: GenerationEngine) -> None:
    samples = _generate(engine, PROMPT, SamplingParams(max_tokens=10, temperature=0), 3)
    assert len(samples) == 3
    assert len(set(samples)) == 1


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_logprobs_are_those_at_the_temperature(
    engine: GenerationEngine, model: Path, temperature: float
) -> None:
    for completion in _generate(engine, PROMPT, SamplingParams(max_tokens=25, temperature=temperature, seed=1), 3):
        assert completion.temperature == temperature
        expected = _reference_logprobs(model, PROMPT, completion.tokens, temperature)
        chosen = expected[range(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)


def test_top_k_logprobs_are_of_the_truncated_distribution(engine: GenerationEngine, model: Path) -> None:
    (completion,) = _generate(engine, PROMPT, SamplingParams(max_tokens=25, top_k=3, seed=2))
    full = _reference_logprobs(model, PROMPT, completion.tokens)
    top = full.topk(3, dim=-1)
    for position, token in enumerate(completion.tokens):
        assert token in top.indices[position]
        expected = full[position, token] - top.values[position].logsumexp(-1)
        assert completion.logprobs[position] == pytest.approx(float(expected), abs=1e-4)


def test_prompt_logprobs_on_request_are_those_of_transformers(engine: GenerationEngine, model: Path) -> None:
    asked = SamplingParams(max_tokens=3, temperature=0.7, seed=1, prompt_logprobs=True)
    first, expected = _generate(engine, PROMPT, asked, 2), _reference_logprobs(model, PROMPT[:1], PROMPT[1:])
    for completion in (*first, *_generate(engine, PROMPT, asked)):  # the second time from a full prefix cache
        np.testing.assert_allclose(
            completion.prompt_logprobs or (), expected[range(len(PROMPT) - 1), PROMPT[1:]], atol=1e-4
        )
    assert _generate(engine, PROMPT, SamplingParams(max_tokens=3))[0].prompt_logprobs is None
    assert first[0].topk_prompt_logprobs is None
    (ranked,) = _generate(engine, PROMPT, replace(asked, topk_prompt_logprobs=4))
    assert ranked.prompt_logprobs == pytest.approx(first[0].prompt_logprobs, abs=1e-4)
    top, found = expected.topk(4), np.array(ranked.topk_prompt_logprobs)  # [P - 1, 4, 2]
    np.testing.assert_array_equal(found[:, :, 0], top.indices)
    np.testing.assert_allclose(found[:, :, 1], top.values, atol=1e-4)


@pytest.mark.stranger("E1")
@pytest.mark.parametrize("length", [127, 128])
def test_a_prompt_that_fills_the_context_is_scored(engine: GenerationEngine, model: Path, length: int) -> None:
    prompt = [3 + i * i % 50 for i in range(length)]
    expected = _reference_logprobs(model, prompt[:1], prompt[1:])
    for asked in (
        SamplingParams(max_tokens=1, prompt_logprobs=True),
        SamplingParams(max_tokens=1, topk_prompt_logprobs=2),
    ):
        for completion in _generate(engine, prompt, asked, 2):
            np.testing.assert_allclose(
                completion.prompt_logprobs or (), expected[range(length - 1), prompt[1:]], atol=1e-4
            )
            sampled = _reference_logprobs(model, prompt, completion.tokens)[0, completion.tokens[0]]
            assert completion.logprobs[0] == pytest.approx(float(sampled), abs=1e-4)
    assert (
        len(_generate(engine, prompt[:-1], SamplingParams(max_tokens=129 - length, ignore_eos=True))[0].tokens)
        == 129 - length
    )


def test_samples_that_share_blocks_have_their_prompts_logprobs(engine: GenerationEngine, model: Path) -> None:
    prompt = [3 + i * i % 50 for i in range(2 * 16 + 9)]  # two whole blocks, and a rest that every sample computes
    for completion in _generate(engine, prompt, SamplingParams(max_tokens=20, seed=5), 4):
        expected = _reference_logprobs(model, prompt, completion.tokens)
        chosen = expected[range(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)


def test_vllm_still_names_too_few_block_sizes(engine: GenerationEngine) -> None:
    assert engine.num_unfinished == 0  # it is built, so vLLM is patched
    from vllm.v1.attention.backends import cpu_attn  # loads vLLM, which a worker without these tests need not do

    source = inspect.getsource(cpu_attn.CPUAttentionBackend)
    assert "return [MultipleOf(32)]" in source, (
        "remove `_blocks_of_16` in generator/cpu/patches.py if 16 is among them now"
    )


def test_samples_follow_the_distribution(engine: GenerationEngine, model: Path) -> None:
    samples = _generate(engine, SHORT, SamplingParams(max_tokens=1, seed=0), 600)
    counts = np.bincount([s.tokens[0] for s in samples], minlength=64)
    expected = 600 * _reference_logprobs(model, SHORT, [0])[0].exp().numpy()
    frequent = expected > 5
    chi_squared = (((counts - expected) ** 2) / expected)[frequent].sum()
    assert chi_squared < frequent.sum() + 4 * np.sqrt(2 * frequent.sum())


def test_seeds_reproduce_and_samples_of_a_call_differ(engine: GenerationEngine) -> None:
    sampling = SamplingParams(max_tokens=20, seed=11)
    first, again = _generate(engine, PROMPT, sampling, 4), _generate(engine, PROMPT, sampling, 4)
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert len({c.tokens for c in first}) == 4
    (third,) = _generate(engine, PROMPT, SamplingParams(max_tokens=20, seed=13))
    assert third.tokens == first[2].tokens
    unseeded = SamplingParams(max_tokens=20)
    assert _generate(engine, PROMPT, unseeded)[0].tokens != _generate(engine, PROMPT, unseeded)[0].tokens


def test_stop_token_and_stop_string_end_a_completion(engine: GenerationEngine, model: Path) -> None:
    (free,) = _generate(engine, PROMPT, SamplingParams(max_tokens=20, temperature=0))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert free.finish_reason == "length"
    assert free.truncated
    assert free.text == tokenizer.decode(free.tokens, skip_special_tokens=True)
    stop = free.tokens[4]
    end = free.tokens.index(stop) + 1
    by_token = _generate(engine, PROMPT, SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,)))[0]
    assert by_token.finish_reason == "stop"
    assert by_token.tokens == free.tokens[:end]
    assert len(by_token.logprobs) == len(by_token.versions) == end
    word = tokenizer.decode([stop])
    by_string = _generate(engine, PROMPT, SamplingParams(max_tokens=20, temperature=0, stop=(word,)))[0]
    assert by_string.finish_reason == "stop"
    assert by_string.tokens == free.tokens[: len(by_string.tokens)]
    assert word not in by_string.text
    assert word in tokenizer.decode(by_string.tokens)


@pytest.mark.paced
async def test_a_request_joins_those_that_run(engine: GenerationEngine) -> None:
    finished: list[str] = []

    async def request(name: str, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=())
        await engine.generate(PROMPT, sampling)
        finished.append(name)

    long = asyncio.create_task(request("long", 80))
    await started(engine, num_tokens=2)
    short = asyncio.create_task(request("short", 2))
    await asyncio.gather(long, short)
    assert finished == ["short", "long"]


async def test_more_requests_than_places_all_finish(engine: GenerationEngine) -> None:
    sampling = SamplingParams(max_tokens=5, seed=0)
    groups = list(await asyncio.gather(*(engine.generate([3 + i, 9], sampling, 2) for i in range(20))))
    assert [len(group) for group in groups] == [2] * 20


def test_vllm_takes_the_defaults_of_its_own_llm(build_engine: EngineFactory, model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    free = {"max_num_batched_tokens": None}  # which is set on a CPU
    taken = build_engine(model, "float32", max_num_seqs=64, engine_args=free).llm.vllm_config.scheduler_config

    def default(asks: UsageContext) -> int:
        asked = EngineArgs(model=str(model), max_model_len=128, max_num_seqs=64, enable_chunked_prefill=False)
        return asked.create_engine_config(asks).scheduler_config.max_num_batched_tokens

    fallback = default(UsageContext.ENGINE_CONTEXT)
    assert taken.max_num_batched_tokens == default(UsageContext.LLM_CLASS) > fallback


def test_the_load_has_what_ran_what_waited_and_what_was_cached(engine: GenerationEngine) -> None:
    places, sampling = engine.llm.vllm_config.scheduler_config.max_num_seqs, SamplingParams(max_tokens=40, seed=0)
    engine.load.take()
    _generate(engine, PROMPT, sampling, 2 * places)
    load = engine.load.take()
    assert load["engine_running_max"] == places
    assert load["engine_waiting_max"] >= 1
    assert 0 < load["engine_kv_use_max"] <= 1
    assert engine.load.take() == {}
    _generate(engine, PROMPT, sampling)  # all of its whole blocks are there
    size = engine.llm.vllm_config.cache_config.block_size
    assert engine.load.take()["engine_prefix_hits"] == (len(PROMPT) - 1) // size * size / len(PROMPT)


async def test_seeded_prompts_longer_than_a_batch_end_no_engine(engine: GenerationEngine) -> None:
    sampling = SamplingParams(max_tokens=2, seed=0)
    await asyncio.gather(*(engine.generate([(i + j) % 60 for j in range(120)], sampling) for i in range(30)))


@pytest.mark.paced
async def test_what_cannot_be_served_raises_and_harms_nobody(engine: GenerationEngine) -> None:
    running = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0)))
    await started(engine, num_tokens=1)
    with pytest.raises(ValueError, match="Token id 9999 is out of vocabulary"):
        await engine.generate([5, 9999], SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match="Token id -3 is out of vocabulary"):
        await engine.generate([5, -3], SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match=r"stop_token_ids has 9999; token ids are between 0 and \d+$"):
        await engine.generate(PROMPT, SamplingParams(max_tokens=5, stop_token_ids=(5, 9999)))
    assert len((await running)[0].tokens) == len((await running)[0].versions)
    as_numpy = await engine.generate(cast(Any, np.array(PROMPT)), SamplingParams(max_tokens=5, temperature=0))
    assert as_numpy == await engine.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0))


@pytest.mark.paced
async def test_a_cancelled_call_frees_its_place(engine: GenerationEngine) -> None:
    sampling = SamplingParams(max_tokens=90, seed=0)
    calls = [asyncio.create_task(engine.generate(PROMPT, sampling, 8)) for _ in range(3)]
    await until(lambda: engine.num_unfinished > 8, "more requests than places")
    steps_before = engine.status().num_steps
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    # All eight places are taken if cancelling did not free them; 24 completions of 90 tokens would come first.
    await engine.generate(SHORT, SamplingParams(max_tokens=2, temperature=0))
    assert engine.num_unfinished == 0
    assert engine.status().num_steps - steps_before < 90


def test_a_closed_engine_says_so(build_engine: EngineFactory, model: Path) -> None:
    closed = build_engine(model, "float32")
    closed.close()
    with pytest.raises(EngineStoppedError, match=r"the generation engine has stopped: .*it was closed"):
        _generate(closed, PROMPT, SamplingParams(max_tokens=2))


def _status_when_idle(engine: GenerationEngine) -> EngineStatus:
    """The thread answers a request shortly before it waits for the next one."""
    wait_until(lambda: engine.status().activity is None, "the engine to be idle")
    return engine.status()


def test_a_thread_that_hangs_between_two_steps_is_not_idle(
    build_engine: EngineFactory, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(model, "float32")
    _generate(engine, PROMPT, SamplingParams(max_tokens=3))
    assert _status_when_idle(engine).activity is None
    add_request, seen = engine.llm.add_request, list[EngineStatus]()

    def hang(*args: Any, **options: Any) -> Any:
        seen.append(engine.status())
        return add_request(*args, **options)

    monkeypatch.setattr(engine.llm, "add_request", hang)
    _generate(engine, PROMPT, SamplingParams(max_tokens=2))
    assert [status.activity for status in seen] == ["command"]
    assert seen[0].slowest_s is not None


def test_an_exception_in_vllm_ends_the_engine_and_is_told(
    build_engine: EngineFactory, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(model, "float32")
    _generate(engine, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    status = _status_when_idle(engine)
    assert (status.activity, status.num_unfinished, status.failure) == (None, 0, None)
    assert status.num_steps >= 3
    seen: list[EngineStatus] = []

    def step() -> None:
        seen.append(engine.status())
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.llm, "step", step)
    for _ in range(2):
        with pytest.raises(EngineStoppedError, match="has stopped: RuntimeError: CUDA error"):
            _generate(engine, PROMPT, SamplingParams(max_tokens=2))
    assert [(s.activity, s.num_unfinished) for s in seen] == [("step", 1)]
    assert seen[0].slowest_s is not None
    assert engine.status().failure == "RuntimeError: CUDA error: an illegal memory access was encountered"
