"""What a generator samples has the log-probs that the trainer computes, bit by bit, however requests meet."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from generator.engine import GenerationEngine
from ownloop_bitwise.engine import BitwiseEngine
from rl.losses import get_loss
from rl.rollouts.episodes import rollout_to_datum
from rl.tiny_models import SERVABLE, tiny_dense
from rl.types import AdamParams, Completion, Datum, Rollout, SamplingParams, Turn
from tests.generator.engines import EngineFactory
from tests.generator.published import pull
from tests.generator.running import run_paced, started
from tests.stores import FakeStore
from trainer.config import TrainerConfig
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

FAMILIES = ("ernie4_5", "exaone4", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3", "windows")
"""Of the core's table; "windows" is a Mistral with sliding windows."""
OFTEN = ("gemma2",)
"""Families that are tried at every change; the others are second proofs. Runs are of Llamas: test_runs.py."""
KINDS = (
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.7),
    SamplingParams(max_tokens=17, temperature=1.3, top_p=0.7),
    SamplingParams(max_tokens=24, top_k=5),
    SamplingParams(max_tokens=12, temperature=0.9, min_p=0.05),
)
Sampled = list[tuple[list[int], SamplingParams, Completion]]


def make(folder: Path, family: str, dtype: str, **options: Any) -> Path:
    shape: dict[str, Any] = {**SERVABLE, "max_position_embeddings": 512, **options}
    if family == "windows":
        family, shape["sliding_window"] = "mistral", 21
    return tiny_dense(family, folder / f"{family}-{dtype}", **shape)


def prompts() -> list[list[int]]:
    """Of many lengths; some begin as others do."""
    random = np.random.default_rng(0)
    found = [random.integers(3, 64, n).tolist() for n in (1, 2, 15, 16, 17, 33, 64, 130)]
    return [*found, [*found[6][:50], 5, 6, 7], [*found[7][:96], 9]]


async def sample(engine: GenerationEngine) -> Sampled:
    """Several samples of each prompt of every kind, all at once."""
    requests = [(p, replace(kind, seed=i)) for i, p in enumerate(prompts()) for kind in KINDS]
    groups = await asyncio.gather(*(engine.generate(p, s, 1 + i % 3) for i, (p, s) in enumerate(requests)))
    return [(p, s, each) for (p, s), group in zip(requests, groups, strict=True) for each in group]


def data(sampled: Sampled) -> list[Datum]:
    return [
        rollout_to_datum(
            Rollout(turns=(Turn(prompt_tokens=tuple(p), completion=c),), reward=1.0, sampling=s),
            np.sin(np.arange(len(c.tokens)) + i),
        )
        for i, (p, s, c) in enumerate(sampled)
    ]


def num_different(batch: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> int:
    where = [datum.weights > 0 for datum in batch]
    ours = np.concatenate([each[at] for each, at in zip(logprobs, where, strict=True)])
    theirs = np.concatenate([datum.loss_inputs["logprobs"][at] for datum, at in zip(batch, where, strict=True)])
    assert len(ours) > 100
    return int((ours.view(np.int32) != theirs.view(np.int32)).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [f if f in OFTEN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_log_probs_are_the_trainers_before_and_after_a_push(
    family: str, dtype: Any, tmp_path: Path, build_engine: EngineFactory
) -> None:
    model = make(tmp_path, family, dtype, tie_word_embeddings=family != "qwen2")
    engine = build_engine(model, dtype, numerics="bitwise", max_model_len=200, max_num_seqs=24, kept_sets=True)
    trainer = BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype=dtype))
    store = FakeStore()
    publisher = WeightPublisher(getattr(torch, dtype), "shared_memory", store=store)

    async def main() -> None:
        for version in range(2):
            batch = data(await sample(engine))
            assert num_different(batch, trainer.forward([batch]).logprobs) == 0
            assert num_different(batch[::3], trainer.forward([batch[::3]]).logprobs) == 0
            output = trainer.forward_backward([batch], get_loss("importance_sampling", {}))
            assert num_different(batch, output.logprobs) == 0
            trainer.optim_step(AdamParams(learning_rate=1e-2))
            await publisher.publish(version + 1, trainer.hf_parameters())
            await pull(engine, store, version + 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", "bfloat16"),
        *(pytest.param("llama", dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_a_request_is_answered_the_same_alone_and_among_others(
    family: str, dtype: Any, tmp_path: Path, build_engine: EngineFactory
) -> None:
    """With the prefix cache on and off, and where requests are preempted for lack of memory."""
    model = make(tmp_path, family, dtype)
    options: dict[str, Any] = {"numerics": "bitwise", "max_model_len": 200, "kept_sets": True}
    whole = build_engine(model, dtype, max_num_seqs=64, **options)
    together = asyncio.run(sample(whole))

    async def one_by_one() -> Sampled:
        found: Sampled = []
        for i, (prompt, kind) in enumerate((p, replace(k, seed=i)) for i, p in enumerate(prompts()) for k in KINDS):
            found += [(prompt, kind, each) for each in await whole.generate(prompt, kind, 1 + i % 3)]
        return found

    uncached = build_engine(model, dtype, max_num_seqs=8, engine_args={"enable_prefix_caching": False}, **options)
    small = 2 * 2 * 32 * 2 * (4 if dtype == "float32" else 2) * 16 * 20  # 20 blocks
    args = {"kv_cache_memory_bytes": small}
    preempting = build_engine(model, dtype, max_num_seqs=64, engine_args=args, **options)
    for other in (asyncio.run(one_by_one()), asyncio.run(sample(uncached)), asyncio.run(sample(preempting))):
        for (_, _, mine), (_, _, theirs) in zip(together, other, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.logprobs == theirs.logprobs


def test_tokens_sampled_after_a_pull_in_flight_have_the_new_weights_log_probs(
    tmp_path: Path, build_engine: EngineFactory
) -> None:
    model = make(tmp_path, "qwen3", "bfloat16")
    engine = build_engine(model, "bfloat16", numerics="bitwise", max_model_len=200, max_num_seqs=16)
    trainer = BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype="bfloat16"))
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, "shared_memory", store=store)
    long = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)

    sampled: list[tuple[list[int], Completion]] = []

    async def main() -> None:
        batch = data([([3, 4], KINDS[0], (await engine.generate([3, 4], KINDS[0]))[0])])
        trainer.forward_backward([batch], get_loss("importance_sampling", {}))
        trainer.optim_step(AdamParams(learning_rate=1e-2))
        await publisher.publish(1, trainer.hf_parameters())
        running = [asyncio.create_task(engine.generate(p, long, 2)) for p in prompts()[:6]]
        await started(engine)
        await pull(engine, store, 1, mode="inflight")
        for prompt, task in zip(prompts(), running, strict=False):
            sampled.extend((prompt, each) for each in await task)

    run_paced(main())
    assert any(len(set(c.versions)) == 2 for _, c in sampled)
    batch = data([(p, long, c) for p, c in sampled])
    for datum, (_, c), logprobs in zip(batch, sampled, trainer.forward([batch]).logprobs, strict=True):
        new = np.array(c.versions) == 1
        where = datum.weights > 0
        assert (logprobs[where][new] == datum.loss_inputs["logprobs"][where][new]).all()
