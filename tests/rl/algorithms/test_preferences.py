from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rl.algorithms.preferences import (
    PAIR_LOSSES,
    WITH_MARGIN,
    PairLoss,
    Pairs,
    reference_logprobs,
    score_pairs,
    sequence_scores,
    weight_pairs,
)
from rl.data.sources import Preference
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from rl.types import AdamParams
from tests.trainer.engine_trainer import EngineTrainer
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy

BETA, MARGIN = 0.3, 0.2


def formula(name: str, sums: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """[B] losses as the papers write them, from log-probs, the reference's and numbers of tokens, each [B, 2]."""
    log_sigmoid, ratios = torch.nn.functional.logsigmoid, sums - reference
    h = ratios[:, 0] - ratios[:, 1]
    mean = sums / lengths
    if name == "dpo":
        return -log_sigmoid(BETA * h - MARGIN)
    if name in ("simpo", "bradley_terry"):  # of a value, which is one number, the mean is itself
        return -log_sigmoid(BETA * mean[:, 0] - BETA * mean[:, 1] - MARGIN)
    if name == "ipo":
        return (h - 1 / (2 * BETA)) ** 2
    if name == "orpo":
        odds = torch.exp(mean) / (1 - torch.exp(mean))
        return -mean[:, 0] - BETA * log_sigmoid(torch.log(odds[:, 0] / odds[:, 1]))
    assert name == "kto"
    z = (BETA * ratios).mean(0).clamp(min=0).detach()
    values = torch.sigmoid(BETA * ratios[:, 0] - z[1]), torch.sigmoid(z[0] - BETA * ratios[:, 1])
    return (1 - values[0]) + (1 - values[1])


def pair_loss(name: str) -> PairLoss:
    head = "value" if name == "bradley_terry" else "lm"
    return PairLoss(name=name, beta=BETA, margin=MARGIN if name in WITH_MARGIN else 0.0, head=head)


PAIRS = [
    Preference(id=str(i), prompt=f"w3 w{i + 4} w5", chosen=" ".join([f"w{9 + i}"] * (1 + i)), rejected="w6 w7 w8")
    for i in range(5)
]


@pytest.mark.parametrize("per_microbatch", [1, 3, 10])
@pytest.mark.parametrize("name", sorted(PAIR_LOSSES.keys() - {"bradley_terry"}))
async def test_the_gradient_is_autograds_of_the_papers_formula(name: str, per_microbatch: int, tmp_path: Path) -> None:
    """Chosen and rejected of a pair in one micro-batch or in two."""
    model = tiny_llama(tmp_path / "model")
    trainer = EngineTrainer(model, per_microbatch)
    batch = pair_loss(name).data(Renderer(model), PAIRS, max_tokens=100)

    (reference,) = await reference_logprobs(trainer, [batch], tmp_path / "reference.json", pair_loss(name))
    for _ in range(2):  # away from the reference, where every difference is 0
        await trainer.forward_backward(batch[::2], "cross_entropy")
        await trainer.optim_step(AdamParams(learning_rate=3e-3))
    losses, slopes = pair_loss(name)(await score_pairs(trainer, batch, reference))
    await trainer.forward_backward(weight_pairs(batch, slopes), "cross_entropy")
    loss = float(losses.sum())

    policy, frozen = ReferencePolicy(model), ReferencePolicy(model)
    by_name = dict(trainer.engine.hf_parameters())
    with torch.no_grad():
        for parameter_name, parameter in policy.model.named_parameters():
            parameter.copy_(by_name[parameter_name])
    sums = [
        [(model.logprobs(datum) * torch.from_numpy(datum.weights)).sum() for datum in batch]
        for model in (policy, frozen)
    ]
    now, before = (torch.stack(values).reshape(-1, 2) for values in sums)
    assert (now - before).detach().diff(dim=1).abs().min() > 0.05
    lengths = torch.tensor([datum.num_loss_tokens for datum in batch]).reshape(-1, 2)
    total = formula(name, now, before.detach(), lengths).sum()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-4)
    for parameter_name, gradient in policy.gradients().items():
        ours = by_name[parameter_name].grad
        assert ours is not None
        assert relative_error(ours, gradient) <= 1e-4, parameter_name


@pytest.mark.parametrize("per_microbatch", [1, 10])
async def test_a_reward_model_is_transformers_classifier(per_microbatch: int, tmp_path: Path) -> None:
    """Loss and gradient are those of the exported model, which reads each answer to its end and no further."""
    model, loss = tiny_llama(tmp_path / "model"), pair_loss("bradley_terry")
    trainer, renderer = EngineTrainer(model, per_microbatch, head="value"), Renderer(model)
    torch.nn.init.normal_(dict(trainer.engine.hf_parameters())["score.weight"])
    batch = loss.data(renderer, PAIRS, max_tokens=100)

    losses, slopes = loss(await score_pairs(trainer, batch, None))
    await trainer.forward_backward(weight_pairs(batch, slopes), loss.token_loss)
    await trainer.export_hf(tmp_path / "reward_model")
    total = float(losses.sum())
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model", dtype=torch.float32)
    values = []
    for pair in PAIRS:
        for answer in (pair.chosen, pair.rejected):
            tokens = [*renderer.encode(pair.prompt), *renderer.encode_completion(pair.prompt, answer)]
            values.append(classifier(input_ids=torch.tensor([tokens])).logits[0, 0])
    chosen, rejected = torch.stack(values).reshape(-1, 2).unbind(1)
    wanted = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected) - MARGIN).sum()
    wanted.backward()
    assert total == pytest.approx(wanted.item(), rel=1e-5)
    by_name = dict(trainer.engine.hf_parameters())
    for name, parameter in classifier.named_parameters():
        ours = by_name[name].grad
        assert ours is not None
        assert parameter.grad is not None
        assert relative_error(ours, parameter.grad) <= 1e-4, name


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_slopes_are_derivatives(name: str) -> None:
    numbers = np.random.default_rng(0)
    sums, reference = -numbers.exponential(20, (2, 16))
    lengths = numbers.integers(1, 30, 16).astype(np.float64)
    losses, slopes = pair_loss(name)(Pairs(logprobs=sums, reference=reference, lengths=lengths))
    rows = torch.from_numpy(sums.reshape(-1, 2).copy()).requires_grad_()
    wanted = formula(name, rows, torch.from_numpy(reference).reshape(-1, 2), torch.from_numpy(lengths).reshape(-1, 2))
    wanted.sum().backward()
    assert rows.grad is not None
    np.testing.assert_allclose(losses, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slopes, rows.grad.numpy().ravel(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_extreme_logprobs_give_finite_losses(name: str) -> None:
    sums = np.array([-1e4, -1e-3, 0.0, -1e4, 0.0, 0.0])
    pairs = Pairs(logprobs=sums, reference=sums[::-1], lengths=np.ones(6))
    assert all(np.isfinite(values).all() for values in pair_loss(name)(pairs))


def test_measurements_of_pairs() -> None:
    logprobs, reference = np.array([-1.0, -3.0, -5.0, -4.0, -2.0, -2.5]), np.array([-2.0, -3.0, -6.0, -4.0, -2.0, -2.5])
    lengths = np.array([1.0, 3, 5, 2, 1, 1])
    loss = PairLoss(name="dpo", beta=0.5)
    measured = loss.measure(Pairs(logprobs=logprobs, reference=reference, lengths=lengths))
    assert measured["accuracy"].values.tolist() == [1, 0, 1]  # the second pair: rejected is still more probable
    assert measured["reward_accuracy"].values.tolist() == [1, 1, 0.5]  # the third has not moved
    assert measured["margin"].values.tolist() == [0.5, 0.5, 0]
    np.testing.assert_allclose(measured["loss"].values, -np.log(1 / (1 + np.exp([-0.5, -0.5, 0]))))
    measured = PairLoss(name="simpo", beta=2.0).measure(Pairs(logprobs=logprobs, reference=None, lengths=lengths))
    assert measured["reward_accuracy"].values.tolist() == [0.5, 1, 1]  # by the mean log-prob of a token
    assert measured["margin"].values.tolist() == [0, 2, 1]


def test_options_that_a_loss_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.head is 'lm'; loss 'bradley_terry' needs 'value'"):
        PairLoss(name="bradley_terry", beta=1.0)
    with pytest.raises(ValueError, match=r"margin is 0\.5, but loss 'kto' has none"):
        PairLoss(name="kto", beta=0.1, margin=0.5)


async def test_the_reference_is_computed_once(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    trainer, file, dpo = EngineTrainer(model), tmp_path / "reference.json", PairLoss(name="dpo", beta=BETA)
    batches = [dpo.data(Renderer(model), pairs, max_tokens=7) for pairs in (PAIRS[:2], PAIRS[4:], PAIRS[2:3])]
    assert [len(batch) for batch in batches] == [4, 0, 2]  # the pair of the second batch is too long

    shorter = await reference_logprobs(trainer, batches[:2], file, dpo)
    first = await reference_logprobs(trainer, batches, file, dpo)
    for array, before in zip(first, shorter, strict=False):
        np.testing.assert_array_equal(array, before)
    for array, batch in zip(first, batches, strict=True):
        np.testing.assert_array_equal(array, await sequence_scores(trainer, batch))
    await trainer.forward_backward(batches[0], "cross_entropy")
    await trainer.optim_step(AdamParams(learning_rate=1e-2))
    for array, again in zip(first, await reference_logprobs(trainer, [], file, dpo), strict=True):
        np.testing.assert_array_equal(array, again)
