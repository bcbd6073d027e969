"""Covers: rl/algorithms/distillation.py"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.algorithms.distillation import eval_kl, reverse_kl_advantages
from rl.data.sources import text_to_datum
from rl.envs.procedural import TextProblem
from rl.lora import LivePolicy, Policy
from rl.rollouts.episodes import with_inputs
from rl.rollouts.rendering import Renderer
from rl.tiny_models import VOCAB_SIZE, tiny_llama
from rl.types import AdamParams, Completion, Datum, PullMode, SamplingParams
from tests.trainer.engine_trainer import EngineTrainer
from trainer.engines.contract.reference import ReferencePolicy


def _datum(q: Sequence[float]) -> Datum:
    datum = text_to_datum([5, 6], [8] * len(q), "completion")
    return with_inputs([datum], logprobs=[np.array([0, *q], dtype=np.float32)])[0]


@pytest.mark.parametrize(
    ("discount", "expected"), [(0.0, [0.5, -1, 2]), (1.0, [1.5, 1, 2]), (0.5, [0.5 - 0.5 + 0.5, -1 + 1, 2])]
)
def test_a_token_has_later_divergence_by_the_discount(discount: float, expected: list[float]) -> None:
    teacher = [np.array([0, -0.5, -3, -1], dtype=np.float32)]  # f - q = 0.5, -1, 2
    (datum,) = reverse_kl_advantages([_datum([-1, -2, -3])], teacher, discount=discount)
    np.testing.assert_allclose(
        datum.loss_inputs["advantages"], [0, *(np.array(expected) - np.mean(expected))], atol=1e-6
    )


class EngineSampler:
    """Samples from an engine's model token by token: a generator without a generator process."""

    def __init__(self, trainer: EngineTrainer) -> None:
        self._policy = trainer
        self._rng = np.random.default_rng(0)

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """See `rl.protocols.Generator`."""
        return [await self._one(list(prompt_tokens), sampling.max_tokens) for _ in range(num_samples)]

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Does nothing: it shares the trainer's weights."""

    async def drop_policy(self, policy: Policy) -> None:
        """Does nothing: there is one policy."""

    async def _one(self, tokens: list[int], max_tokens: int) -> Completion:
        sampled: list[int] = []
        logprobs: list[float] = []
        for _ in range(max_tokens):
            distribution = await next_token_logprobs(self._policy, [*tokens, *sampled])
            sampled.append(int(self._rng.choice(VOCAB_SIZE, p=np.exp(distribution) / np.exp(distribution).sum())))
            logprobs.append(float(distribution[sampled[-1]]))
        return Completion(
            tokens=tuple(sampled),
            logprobs=tuple(logprobs),
            versions=(0,) * len(sampled),
            text="",
            finish_reason="length",
        )


async def next_token_logprobs(trainer: EngineTrainer, tokens: Sequence[int]) -> np.ndarray:
    """[V] log-probs of the next token after these."""
    datums = [text_to_datum(tokens, [candidate], "completion") for candidate in range(VOCAB_SIZE)]
    return np.array([float(logprobs[-1]) for logprobs in (await trainer.forward(datums)).logprobs])


async def true_kl(student: EngineTrainer, teacher: EngineTrainer, prompts: Sequence[Sequence[int]]) -> float:
    """Mean over prompts of KL(student || teacher) of the next token, over the whole vocabulary."""
    total = 0.0
    for prompt in prompts:
        q, f = await next_token_logprobs(student, prompt), await next_token_logprobs(teacher, prompt)
        total += float((np.exp(q) * (q - f)).sum())
    return total / len(prompts)


@pytest.mark.slow  # its expected gradient is that of the KL: the next test
def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    """Steps of sampling, grading and policy gradient reduce the KL over the whole vocabulary."""
    model = tiny_llama(tmp_path / "model")
    student, teacher = EngineTrainer(model, 64), EngineTrainer(model, 64)
    prompts = [(3, 4 + i) for i in range(4)]
    problems = [TextProblem(id=str(p), prompt=" ".join(f"w{t}" for t in p), score=len) for p in prompts]
    sampling, generator = SamplingParams(max_tokens=1, seed=0), EngineSampler(student)

    async def run() -> tuple[float, float]:
        for _ in range(3):  # so that the teacher differs from the student
            lesson = [text_to_datum(p, [9 + i], "completion") for i, p in enumerate(prompts)]
            await teacher.forward_backward(lesson, "cross_entropy")
            await teacher.optim_step(AdamParams(learning_rate=3e-3))
        before = await true_kl(student, teacher, prompts)
        measured = await eval_kl(generator, teacher, Renderer(model), problems * 40, sampling)
        assert measured.interval.low * 0.8 < before < measured.interval.high * 1.2
        for _ in range(8):
            sampled: list[Datum] = []
            for prompt in prompts:
                for completion in await generator.generate(prompt, sampling, 32):
                    datum = text_to_datum(prompt, completion.tokens, "completion")
                    logprobs = np.array([0.0, *completion.logprobs], dtype=np.float32)
                    sampled += with_inputs([datum], logprobs=[logprobs])
            batch = reverse_kl_advantages(sampled, (await teacher.forward(sampled)).logprobs)
            await student.forward_backward(batch, "importance_sampling")
            await student.optim_step(AdamParams(learning_rate=2e-3), grad_scale=1 / len(batch))
        return before, await true_kl(student, teacher, prompts)

    before, after = asyncio.run(run())
    assert before > 0.05
    assert after < 0.5 * before


def test_the_expected_gradient_is_that_of_the_kl(tmp_path: Path) -> None:
    """Instead of samples, every token is used, weighted by its probability, so that the expectation is exact."""
    model, prompt = tiny_llama(tmp_path / "model"), (3, 4, 5)
    student, teacher = EngineTrainer(model, 64), EngineTrainer(model, 64)

    async def run() -> None:
        lesson = [text_to_datum(prompt, [9], "completion")]
        await teacher.forward_backward(lesson, "cross_entropy")
        await teacher.optim_step(AdamParams(learning_rate=1e-2))
        datums = [text_to_datum(prompt, [token], "completion") for token in range(VOCAB_SIZE)]
        q, f = (await student.forward(datums)).logprobs, (await teacher.forward(datums)).logprobs
        batch = reverse_kl_advantages(with_inputs(datums, logprobs=q), f)
        probabilities = [np.where(d.weights != 0, np.exp(p), 0) for d, p in zip(batch, q, strict=True)]
        weighted = with_inputs(batch, weights=probabilities)
        await student.forward_backward(weighted, "importance_sampling")

    asyncio.run(run())
    policy = ReferencePolicy(model)
    tokens = torch.tensor([prompt])
    log_q = torch.log_softmax(policy.model(tokens).logits[0, -1], -1)
    frozen = ReferencePolicy(model)
    with torch.no_grad():
        named = dict(teacher.engine.hf_parameters())
        for name, parameter in frozen.model.named_parameters():
            parameter.copy_(named[name])
        log_f = torch.log_softmax(frozen.model(tokens).logits[0, -1], -1)
    (log_q.exp() * (log_q - log_f)).sum().backward()
    gradients = policy.gradients()
    for name, parameter in student.engine.hf_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
