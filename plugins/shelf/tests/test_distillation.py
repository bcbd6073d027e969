import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ownloop_shelf.distillation import Objective, Teachers, reverse_kl_advantages, with_hint
from rl.data.sources import text_to_datum
from rl.envs.procedural import TextProblem
from rl.lora import LivePolicy, Policy
from rl.rollouts.episodes import with_inputs
from rl.rollouts.rendering import Renderer
from rl.tiny_models import VOCAB_SIZE, tiny_llama
from rl.types import AdamParams, Completion, Datum, Group, PullMode, Rollout, SamplingParams, Turn
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
        best = sampling.topk_prompt_logprobs
        sampled = [await self._one(list(prompt_tokens), sampling.max_tokens) for _ in range(num_samples)]
        if best:
            after = [await next_token_logprobs(self._policy, prompt_tokens[:i]) for i in range(1, len(prompt_tokens))]
            rows = tuple(tuple((int(w), float(row[w])) for w in np.argsort(-row)[:best]) for row in after)
            sampled = [replace(each, topk_prompt_logprobs=rows) for each in sampled]
        return sampled

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
    frozen = _plain_policy(model, teacher)
    with torch.no_grad():
        log_f = torch.log_softmax(frozen.model(tokens).logits[0, -1], -1)
    (log_q.exp() * (log_q - log_f)).sum().backward()
    gradients = policy.gradients()
    for name, parameter in student.engine.hf_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


def _objective(kind: str, words: int, **more: Any) -> Objective:
    return Objective(divergence=kind, top_k=words, **more)  # type: ignore[arg-type]


def _taught(model: Path, *targets: int) -> EngineTrainer:
    """A teacher that differs from the student."""
    teacher = EngineTrainer(model, 64)
    for target in targets:
        asyncio.run(teacher.forward_backward([text_to_datum((3, 4, 5), [target, 7], "completion")], "cross_entropy"))
        asyncio.run(teacher.optim_step(AdamParams(learning_rate=1e-2)))
    return teacher


def _rollout(prompt: Sequence[int], answer: Sequence[int], reward: float = 0.0) -> Rollout:
    size = len(answer)
    completion = Completion(
        tokens=tuple(answer), logprobs=(-1.0,) * size, versions=(0,) * size, text="w9", finish_reason="stop"
    )
    return Rollout(turns=(Turn(prompt_tokens=tuple(prompt), completion=completion),), reward=reward)


def _plain_policy(model: Path, trainer: EngineTrainer) -> ReferencePolicy:
    """Plain transformers with the trainer's weights."""
    policy, named = ReferencePolicy(model), dict(trainer.engine.hf_parameters())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(named[name])
    return policy


def _distributions(policy: ReferencePolicy, tokens: Sequence[int], size: int) -> torch.Tensor:
    """[size, V] log-probs of the last tokens of a sequence."""
    return torch.log_softmax(policy.model(torch.tensor([tokens])).logits[0, -size - 1 : -1], -1)


def _plain(kind: str, p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """The divergence, summed over positions and the words that are given."""
    p_, f_ = p.exp(), f.exp()
    middle = (p_ + f_) / 2
    return {
        "reverse_kl": p_ * (p - f) - p_ + f_,
        "forward_kl": f_ * (f - p) - f_ + p_,
        "jensen_shannon": (p_ * (p - middle.log()) + f_ * (f - middle.log())) / 2,
    }[kind].sum()


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jensen_shannon"])
@pytest.mark.parametrize("words", [3, -1])
def test_words_of_two_teachers_against_plain_torch(tmp_path: Path, kind: str, words: int) -> None:
    """Value and gradient, of the most probable words and of the whole vocabulary."""
    model = tiny_llama(tmp_path / "model")
    student, teachers = EngineTrainer(model, 5), [_taught(model, 9), _taught(model, 20, 30)]
    objective = _objective(kind, words, more_teachers={"b": 0.25})
    grading = Teachers(objective, "a", teachers, student, EngineSampler(student), Renderer(model), model)
    rollouts = (_rollout((3, 4), (9, 8, 7)), _rollout((3, 4), (11,)))
    group = Group(problem_id="one", prompt="", rollouts=rollouts)

    graded = asyncio.run(grading.grade([group], {}))
    output = asyncio.run(student.forward_backward(graded.batch, objective.loss))
    ours, others = _plain_policy(model, student), [_plain_policy(model, teacher) for teacher in teachers]
    expected = torch.zeros(())
    for rollout in rollouts:
        (turn,) = rollout.turns
        tokens, size = (*turn.prompt_tokens, *turn.completion.tokens), len(turn.completion.tokens)
        p = _distributions(ours, tokens, size)
        chosen = p.topk(VOCAB_SIZE if words == -1 else words).indices
        for other, weight in zip(others, (0.75, 0.25), strict=True):
            f = _distributions(other, tokens, size).detach()
            expected = expected + weight * _plain(kind, p.gather(1, chosen), f.gather(1, chosen))
    expected.backward()
    measured = {"kl_to_teacher": expected.item() / 4, "graded_fraction": 1.0}
    assert graded.metrics(output) == pytest.approx(measured, rel=1e-4)
    gradients = ours.gradients()
    for name, parameter in student.engine.hf_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("hint", ["answer", "peer"])
def test_a_hint_is_read_by_the_teacher_alone(tmp_path: Path, hint: str) -> None:
    """The student is its own teacher: its log-probs of the same answer after another prompt."""
    model = tiny_llama(tmp_path / "model")
    student, renderer = _taught(model, 9, 12), Renderer(model)
    problem = TextProblem(id="one", prompt="w3 w4", score=len, answer="w9")
    prompt, answer = renderer.encode_problem(problem), (9, 8, 7)
    rollouts = (_rollout(prompt, answer), _rollout(prompt, (11,), reward=1.0))
    group = Group(problem_id="one", prompt="", rollouts=rollouts)
    objective = _objective("sampled", 0, hint=hint, hint_text="w5 {hint} w6")
    grading = Teachers(objective, "self", (), student, EngineSampler(student), renderer, model)

    graded = asyncio.run(grading.grade([group], {"one": problem}))
    assert len(graded.sampled) == (2 if hint == "answer" else 1)  # the best one has no better peer
    hinted = (*renderer.encode("w5 w9 w6\nw3 w4"), *answer)
    f = _distributions(_plain_policy(model, student), hinted, len(answer))
    expected = [0.0] * (len(prompt) - 1) + f[range(3), answer].tolist()
    assert graded.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_a_task_has_its_own_teacher(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    teachers = [_taught(model), _taught(model, 9), _taught(model, 20)]
    objective = _objective("sampled", 0, task_teachers={"words": "b"}, more_teachers={"c": 0.25})
    grading = Teachers(objective, "a", teachers, teachers[0], EngineSampler(teachers[0]), Renderer(model), model)
    rollout = _rollout((3, 4), (9, 8))
    groups = [Group(problem_id=name, prompt="", rollouts=(rollout,)) for name in ("words: 1", "sums: 1")]
    graded = asyncio.run(grading.grade(groups, {}))
    a, b, c = (asyncio.run(each.forward(graded.sampled[:1])).logprobs[0] for each in teachers)
    np.testing.assert_allclose(graded.logprobs, [b, 0.75 * a + 0.25 * c], atol=1e-6)


def test_a_hint_follows_the_users_last_message() -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    assert with_hint(chat, "h") == [{"role": "user", "content": "q\n\nh"}, chat[1]]
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    (message,) = with_hint(parts, "h")
    assert message["content"][1] == {"type": "text", "text": "h"}  # type: ignore[index]
    with pytest.raises(ValueError, match=r"objective.hint is added to a message of the user"):
        with_hint([{"role": "system", "content": "s"}], "h")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"divergence": "kl"}, r"Objective.divergence is 'kl'"),
        ({"top_k": 5}, r"objective.top_k is 5; with divergence 'sampled' it must be 0"),
        ({"divergence": "reverse_kl", "top_k": 21}, r"objective.top_k is 21; .* from 1 to 20, or -1 for all"),
        ({"divergence": "reverse_kl", "top_k": 5, "discount": 0.5}, r"only divergence 'sampled' has one"),
        ({"discount": 2}, r"Objective.discount is 2"),
        ({"hint_text": "no"}, r"Objective.hint_text is 'no'"),
        ({"more_teachers": {"b": 1.0}}, r"below 1 in sum"),
        ({"more_teachers": {"b": -0.1}}, r"more_teachers.b is -0.1"),
    ],
)
def test_mistakes_of_an_objective_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**wrong)


def test_an_objective_that_cannot_be_met_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set objective.hint"):
        Objective().names("self")
    model = tiny_llama(tmp_path / "model", vocab_size=5000)
    with pytest.raises(ValueError, match=r"top_k is -1 and the model has 5000"):
        _objective("reverse_kl", -1).models("a", model, ())
    unknown = TextProblem(id="one", prompt="w3", score=len)
    with pytest.raises(ValueError, match=r"problem 'one' has no attribute `answer`; use 'peer'"):
        Objective(hint="answer").models("self", model, [unknown])


@pytest.mark.parametrize("objective", [Objective(hint="peer"), Objective(divergence="reverse_kl", top_k=3)])
def test_a_replay_that_lacks_hints_or_words_is_refused(objective: Objective) -> None:
    objective.check("other", replays=False)
    with pytest.raises(ValueError, match=r"objective\.hint is .* and objective\.top_k \d; a replay has neither"):
        objective.check("other", replays=True)
    Objective().check("other", replays=True)


@pytest.mark.stranger("B2")
def test_a_reported_position_changes_no_advantage() -> None:
    rng = np.random.default_rng(0)
    scores, logprobs = (-rng.exponential(size=8).astype(np.float32) for _ in range(2))
    found: list[list[float]] = []
    weights = np.array([0.0] * 5 + [1.0] * 3, dtype=np.float32)
    for mask in (weights > 1, weights == 0):
        inputs = {"target_tokens": np.arange(8), "weights": weights, "reported_mask": mask, "logprobs": logprobs}
        (datum,) = reverse_kl_advantages([Datum(tokens=np.arange(8), loss_inputs=inputs)], [scores], discount=0.5)
        found.append(datum.loss_inputs["advantages"].tolist())
    assert found[0] == found[1]
