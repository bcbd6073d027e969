"""A cut distribution from end to end, in float32: sampled by vLLM, scored by the trainer, against transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from generator.engine import GenerationEngine
from rl.losses import get_loss
from rl.rollouts.episodes import rollout_to_datum
from rl.types import AdamParams, Datum, Rollout, SamplingParams, Turn
from tests.generator.engines import EngineFactory
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import ReferencePolicy, gradients, importance_sampling

pytestmark = pytest.mark.vllm

CAP = 2.0  # of `grpo_async`
SAMPLING = SamplingParams(max_tokens=24, temperature=0.7, top_p=0.8, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_llama(tmp_path_factory.mktemp("kept") / "model", tied=False)


@pytest.fixture(scope="module")
def engine(build_engine: EngineFactory, model: Path) -> GenerationEngine:
    return build_engine(model, "float32")


def _sampled(engine: GenerationEngine, sampling: SamplingParams) -> list[Datum]:
    """Four samples of each of four prompts, all at once, and as many requests that cut nothing."""
    prompts = [tuple(np.random.default_rng(i).integers(3, 60, 20).tolist()) for i in range(4)]
    whole = SamplingParams(max_tokens=3, seed=1)

    async def sample() -> list[Datum]:
        groups = await asyncio.gather(*(engine.generate(p, s, 4) for s in (sampling, whole) for p in prompts))
        assert all(sample.kept is None for group in groups[4:] for sample in group)
        return [
            rollout_to_datum(
                Rollout(turns=(Turn(prompt_tokens=p, completion=c),), reward=1.0, sampling=sampling),
                np.sin(np.arange(len(c.tokens)) + i),
            )
            for p, group in zip(prompts, groups[:4], strict=True)
            for i, c in enumerate(group)
        ]

    return asyncio.run(sample())


def test_the_trainer_scores_what_was_sampled(engine: GenerationEngine, model: Path) -> None:
    """The bar is 1e-5 a token, in trees and alone; without kept sets and temperature the difference is 0.5."""
    batch = _sampled(engine, SAMPLING)
    trainer = load_engine(TrainerConfig(model=model, compute_dtype="float32"))
    alone = [trainer.forward([[datum]]).logprobs[0] for datum in batch]
    for scores in (alone, trainer.forward([batch]).logprobs):
        difference = [(p - d.loss_inputs["logprobs"])[d.counted] for p, d in zip(scores, batch, strict=True)]
        assert np.abs(np.concatenate(difference)).max() < 1e-5
    trainer.forward_backward([batch], get_loss("importance_sampling"))
    reference = ReferencePolicy(model)
    reference.backward(batch, importance_sampling)
    found, expected = gradients(trainer), reference.gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_two_steps_later_every_token_still_has_its_probability(
    engine: GenerationEngine, model: Path, tmp_path: Path
) -> None:
    """As in an asynchronous run: of sets that were cut again, by the new weights, some would lack the sampled token."""
    batch = _sampled(engine, SAMPLING)
    trainer = load_engine(TrainerConfig(model=model, compute_dtype="float32"))
    for _ in range(2):
        trainer.forward_backward([batch], get_loss("importance_sampling", {"importance_cap": CAP}))
        trainer.optim_step(AdamParams(learning_rate=3e-3), grad_scale=1 / 100)
    trainer.export_hf(tmp_path / "model", torch.float32)
    exact = ReferencePolicy(tmp_path / "model")
    exact.model.double()
    num_above = num_cut_off = 0
    for datum, logprobs in zip(batch, trainer.forward([batch]).logprobs, strict=True):
        sampled = datum.loss_inputs["logprobs"][datum.counted]
        ours = np.exp(logprobs[datum.counted] - sampled)
        expected = np.exp(exact.logprobs(datum).detach().numpy()[datum.counted] - sampled)
        assert np.isfinite(logprobs).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-4)
        assert not ((ours > CAP) & (expected < CAP * (1 - 1e-4))).any()
        num_above += int((expected > CAP).sum())
        probs = (exact.logits(datum) / datum.temperature).softmax(-1).detach().numpy()[datum.counted]
        chosen = probs[np.arange(len(probs)), datum.loss_inputs["target_tokens"][datum.counted]]
        num_cut_off += int((np.where(probs > chosen[:, None], probs, 0).sum(1) >= SAMPLING.top_p).sum())
    assert num_above > 0 < num_cut_off, "the two steps have moved too little to show anything"


@pytest.mark.parametrize("cut", [{"top_k": 7}, {"min_p": 0.3}, {"top_p": 0.5, "top_k": 9, "min_p": 0.1}])
def test_every_cut_returns_the_words_that_it_keeps(
    engine: GenerationEngine, model: Path, cut: dict[str, float]
) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.3, seed=3, **cut)  # pyright: ignore[reportArgumentType]
    batch = _sampled(engine, sampling)
    reference = ReferencePolicy(model)
    for datum in batch:
        assert datum.kept is not None
        assert datum.kept.fault(datum.loss_inputs["target_tokens"], 10**6) == ""
        assert (datum.kept.counts[datum.counted] > 0).all()
        assert datum.kept.counts.max() <= sampling.most_kept
        expected = reference.logprobs(datum).detach().numpy()[datum.counted]
        np.testing.assert_allclose(datum.loss_inputs["logprobs"][datum.counted], expected, atol=1e-4)
        if "min_p" in cut:
            highest = (reference.logits(datum) / 1.3).softmax(-1).detach().numpy().max(-1)
            assert np.isfinite(highest).all()
