"""What is sampled with drafts is what is sampled without, seed by seed, and right by transformers and plain softmax."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from generator.config import LoRALimits, Speculation
from generator.engine import GenerationEngine
from generator.options import cpu_block_size
from ownloop_speculation.history import History
from ownloop_speculation.replay import PrefixCache, Request, replay
from plugins.speculation.tests.drafting import Always, Never, Wild, draft_always
from rl.tiny_models import SERVABLE, tiny_llama
from rl.types import Completion, SamplingParams
from tests.generator.adapted import largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import export, moved, pull
from tests.generator.running import run_paced, started, versions_of
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

PROMPT = [3, 9, 4, 9, 4, 7, 9, 4, 9, 4, 7, 9, 4, 9]
CUTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "cold": {"temperature": 0.6},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "all": {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "temperature": 1.2},
    "stops": {"stop_token_ids": (9, 4), "stop": ("w7 w9", "w11"), "prompt_logprobs": True},
}
DRAFTS = {"good": History, "poor": Wild, "absent": History}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {
        **SERVABLE,
        "initializer_range": 0.25,
    }  # its distributions are as sharp as a language model's
    return tiny_llama(tmp_path_factory.mktemp("drafted") / "model", **shape)


@pytest.fixture(scope="module")
def plain(build_engine: EngineFactory, model: Path) -> GenerationEngine:
    return build_engine(model, "float32")


@pytest.fixture(scope="module")
def drafting(build_engine: EngineFactory, model: Path) -> GenerationEngine:
    return build_engine(model, "float32", speculation=Speculation(min_chance=0.0))


def sample(engine: GenerationEngine, prompt: Sequence[int], sampling: SamplingParams, n: int = 8) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, sampling, n))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Equal in all but the last bits of log-probs, which depend on the batch."""
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert replace(one, logprobs=other.logprobs, prompt_logprobs=other.prompt_logprobs) == other
        if other.prompt_logprobs is not None:
            assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5)


def final_logprobs(model: Path, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
    """[N, V] log-probs that each token was sampled with, by transformers and plain cuts; -inf where it was cut off."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logits = logits / (sampling.temperature or 1.0)
    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    ordered = logits.sort(-1, descending=True)
    if 0 < sampling.most_kept < logits.shape[1]:
        ordered.values[:, sampling.most_kept :] = -torch.inf
    before = ordered.values.softmax(-1).cumsum(-1) - ordered.values.softmax(-1)
    ordered.values[(before >= sampling.top_p) & (before > 0)] = -torch.inf
    return torch.full_like(logits, -torch.inf).scatter_(1, ordered.indices, ordered.values).log_softmax(-1)


def assert_right(model: Path, prompt: Sequence[int], found: Completion, sampling: SamplingParams) -> None:
    """Log-probs and kept sets are those of transformers and plain cuts."""
    by_reference = final_logprobs(model, prompt, found.tokens, sampling)
    chosen = by_reference[range(len(found.tokens)), found.tokens]
    assert found.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
    assert (found.kept is None) == (not sampling.cuts or sampling.temperature == 0)
    if found.kept is not None:
        kept = [found.kept.ids[a:b].tolist() for a, b in zip(found.kept.starts, found.kept.starts[1:], strict=False)]
        assert kept == [np.flatnonzero(row > -np.inf).tolist() for row in by_reference.numpy()]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("cut", CUTS)
def test_drafts_change_no_sample(
    plain: GenerationEngine, drafting: GenerationEngine, model: Path, cut: str, drafts: str
) -> None:
    sampling = SamplingParams(max_tokens=40, seed=5, **CUTS[cut])
    drafter = draft_always(drafting, DRAFTS[drafts])
    if drafts == "absent":
        drafter.rule = Never()
    sample(drafting, PROMPT, sampling)  # the second time, good drafts are what was sampled
    drafting.load.take()
    found, expected = sample(drafting, PROMPT, sampling), sample(plain, PROMPT, sampling)
    assert_same(found, expected)
    for each in found:
        assert_right(model, PROMPT, each, sampling)
    load = drafting.load.take()
    if drafts == "good":
        assert load["engine_accepted_tokens"] > 0.5 * load["engine_draft_tokens"] > 0
        assert load["engine_tokens_per_step"] > 2
    elif drafts == "poor":
        assert load["engine_accepted_tokens"] < load["engine_draft_tokens"]
    else:
        assert (load["engine_draft_tokens"], load["engine_tokens_per_step"]) == (0, 1)


def test_requests_of_all_kinds_share_a_batch(plain: GenerationEngine, drafting: GenerationEngine) -> None:
    draft_always(drafting)

    async def main(engine: GenerationEngine) -> list[list[Completion]]:
        requests = [SamplingParams(max_tokens=30, seed=9, **options) for options in CUTS.values()]
        return await asyncio.gather(*(engine.generate(PROMPT[: 6 + i], s, 2) for i, s in enumerate(requests)))

    for _ in range(2):
        for found, expected in zip(asyncio.run(main(drafting)), asyncio.run(main(plain)), strict=True):
            assert_same(found, expected)


def test_prompts_that_go_on_with_a_completion_and_fill_the_context(
    plain: GenerationEngine, drafting: GenerationEngine
) -> None:
    drafter, prompt = draft_always(drafting), PROMPT
    for seed in (0, 1, 0):
        prompt = PROMPT
        for max_tokens in (24, 24, 128 - len(PROMPT) - 50):
            sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, temperature=0.5)
            (found,), (expected,) = (sample(each, prompt, sampling, 1) for each in (drafting, plain))
            assert_same([found], [expected])
            prompt = [*prompt, *found.tokens, 5]
    assert len(prompt) == 129
    assert drafter.history.num_kept_tokens > 0


def test_drafts_from_the_request_itself_change_nothing(
    build_engine: EngineFactory, model: Path, plain: GenerationEngine
) -> None:
    engine = build_engine(model, "float32", speculation=Speculation(source="ngram", min_chance=0.0))
    drafter = draft_always(engine)
    drafter.history = History(max_tokens=1, own_only=True)
    sampling = SamplingParams(max_tokens=60, temperature=0.3, seed=1)
    assert_same(sample(engine, PROMPT * 2, sampling), sample(plain, PROMPT * 2, sampling))
    assert engine.load.take()["engine_draft_tokens"] > 0


def test_streams_and_what_vllm_computes_from_earlier_tokens(
    plain: GenerationEngine, drafting: GenerationEngine
) -> None:
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    draft_always(drafting)
    params = vllm.SamplingParams(max_tokens=40, seed=3, logprobs=2, temperature=0.5)
    kinds: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.5},
        {"logit_bias": {9: 3.0}},
        {"min_tokens": 30, "stop_token_ids": [4]},
        {"bad_words": ["w9"]},
        {"allowed_token_ids": [4, 7, 9, 11]},
        {"structured_outputs": StructuredOutputsParams(regex=r"(w4|w7|w9)( (w4|w7|w9|w11)){5,12}")},
    ]

    async def one(engine: GenerationEngine, options: dict[str, Any]) -> tuple[Any, ...]:
        of_kind = params.clone()
        for name, value in options.items():
            setattr(of_kind, name, value)
        outputs = [output async for output in engine.stream(PROMPT, of_kind)]
        last = outputs[-1].outputs[0]
        assert last.logprobs is not None
        most = [sorted(each, key=lambda token: each[token].logprob) for each in last.logprobs]
        return last.token_ids, last.finish_reason, most, len(outputs)

    async def main(engine: GenerationEngine) -> list[tuple[Any, ...]]:
        return await asyncio.gather(*(one(engine, options) for options in kinds))

    expected = asyncio.run(main(plain))
    asyncio.run(main(drafting))
    found = asyncio.run(main(drafting))
    assert [each[:3] for each in found] == [each[:3] for each in expected]
    assert found[0][3] < expected[0][3], "a stream gets all tokens of a step at once"


def test_tokens_of_a_step_have_the_version_that_sampled_them(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = tiny_llama(tmp_path / "model", **SERVABLE)
    engine = build_engine(directory, "float32", speculation=Speculation())
    draft_always(engine, Wild)
    models = {0: directory, 3: export(directory, moved(directory, 3), torch.float32, tmp_path / "three")}
    sampling, store = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True), FakeStore()

    async def main() -> None:
        await WeightPublisher(torch.float32, store=store).publish(3, moved(directory, 3).items())
        await engine.generate(PROMPT, sampling)
        running = asyncio.create_task(engine.generate(PROMPT, sampling))
        await started(engine)
        await pull(engine, store, 3, mode="inflight")
        (found,) = await running
        assert set(versions_of(found)) == {0, 3}
        for version, path in models.items():
            expected = final_logprobs(path, PROMPT, found.tokens, sampling)
            places = [place for place, each in enumerate(found.versions) if each == version]
            assert [found.logprobs[p] for p in places] == pytest.approx(
                [float(expected[p, found.tokens[p]]) for p in places], abs=1e-4
            )

    run_paced(main())


def test_adapters_draft_from_one_history(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = tiny_llama(tmp_path / "model", **SERVABLE)
    limits = LoRALimits(max_rank=8, max_adapters=2, max_loaded=2)
    engine = build_engine(directory, "float32", lora=limits, speculation=Speculation())
    draft_always(engine)
    adapters = {name: random_adapter(directory, seed) for seed, name in enumerate("ab")}
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)

    async def main() -> None:
        for name, adapter in adapters.items():
            await pull_adapter(engine, name, 1, adapter)
        await engine.generate(PROMPT, sampling, policy="a")
        requests = (engine.generate(PROMPT, sampling, policy=name) for name in (None, *adapters))
        (base,), *adapted = await asyncio.gather(*requests)
        assert largest_error(AutoModelForCausalLM.from_pretrained(directory), PROMPT, base) < 5e-5
        for adapter, (found,) in zip(adapters.values(), adapted, strict=True):
            assert largest_error(merged(directory, adapter), PROMPT, found) < 5e-5

    run_paced(main())
    assert engine.load.take()["engine_accepted_tokens"] > 0


def test_a_replay_of_what_was_sampled_counts_what_an_engine_counts(
    drafting: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, prompt, of_prompts = draft_always(drafting), [11, *PROMPT * 3], list[int]()
    monkeypatch.setattr(drafter.rule, "observe_prompts", lambda num_tokens, _: of_prompts.append(num_tokens))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    drafting.load.take()
    requests: list[Request] = []
    for seed in range(6):
        sampling = SamplingParams(max_tokens=30, seed=seed % 4, temperature=0.4, ignore_eos=True)
        (found,) = sample(drafting, prompt, sampling, 1)
        requests.append(Request(tuple(prompt), found.tokens, 0, found.logprobs))
    load = drafting.load.take()
    prefixes = PrefixCache(cpu_block_size("float32"))
    again = replay(requests, History(max_tokens=1 << 20), Always(), prefixes, running=1, max_draft=8, min_chance=0.0)
    assert (again.drafted, again.accepted) == (load["engine_draft_tokens"], load["engine_accepted_tokens"])
    assert again.tokens_per_step == load["engine_tokens_per_step"] > 1.2
    assert again.prompt_tokens - 6 == sum(of_prompts) < 6 * len(prompt) - 6
    assert drafter.history.num_kept_tokens == 5 * 31, "the last one ends with the next step"


def exact_probs(model: Path, sampling: SamplingParams) -> "np.ndarray[Any, Any]":
    """[V, V, V] of the first three tokens; a completion that has ended goes on with its end token."""
    end, size = 2, 64

    def following(prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
        with torch.no_grad():
            parts = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes]).split(512)
            logits = torch.cat([reference(part).logits[:, -1] for part in parts]) / sampling.temperature
        ordered = logits.sort(-1, descending=True)
        before = ordered.values.softmax(-1).cumsum(-1) - ordered.values.softmax(-1)
        ordered.values[(before >= sampling.top_p) & (before > 0)] = -torch.inf
        cut = torch.full_like(logits, -torch.inf).scatter_(1, ordered.indices, ordered.values)
        probs = cut.double().softmax(-1)
        for row, prefix in enumerate(prefixes):
            if end in prefix:
                probs[row] = torch.nn.functional.one_hot(torch.tensor(end), size)
        return probs

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    first = following([()])[0]
    second = following([(a,) for a in range(size)])
    third = following([(a, b) for a in range(size) for b in range(size)]).view(size, size, size)
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def chi_square(counts: "np.ndarray[Any, Any]", probs: "np.ndarray[Any, Any]") -> float:
    """The p-value of counts; cells that are expected fewer than 5 times are one."""
    expected, found = probs.ravel() * counts.sum(), counts.ravel()
    if found[expected == 0].any():  # impossible tokens
        return 0.0
    often = expected >= 5
    expected, found = (np.append(each[often], each[~often].sum()) for each in (expected, found))
    value = ((found - expected) ** 2 / expected)[expected > 0].sum()
    degrees = (expected > 0).sum() - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(value / 2).double()))


@pytest.mark.parametrize(
    ("options", "num_samples"),
    [
        ({"top_p": 0.9}, 2048),
        *(pytest.param(o, 20_000, marks=pytest.mark.slow) for o in ({}, {"temperature": 0.6}, {"top_p": 0.9})),
    ],
    ids=str,
)
def test_the_first_three_tokens_have_the_models_distribution(
    drafting: GenerationEngine, model: Path, options: dict[str, Any], num_samples: int
) -> None:
    draft_always(drafting, Wild)
    sampling, counts = SamplingParams(max_tokens=3, seed=10_000, **options), np.zeros((64, 64, 64))
    drafting.load.take()
    for start in range(0, num_samples, 256):
        for each in sample(drafting, PROMPT, replace(sampling, seed=10_000 + start), min(256, num_samples - start)):
            counts[tuple((*each.tokens, 2, 2)[:3])] += 1
    assert drafting.load.take()["engine_accepted_tokens"] > num_samples / 20
    probs = exact_probs(model, sampling)
    assert chi_square(counts, probs) > 0.01
    assert chi_square(counts, exact_probs(model, replace(sampling, temperature=0.8 * sampling.temperature))) < 1e-6
