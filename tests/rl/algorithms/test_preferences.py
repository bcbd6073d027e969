import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.algorithms.preferences import (
    PAIR_LOSSES,
    log_ratio_differences,
    measure_pairs,
    preferences_to_data,
    reference_logprobs,
    sequence_logprobs,
    weight_pairs,
)
from rl.data.sources import Preference
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from rl.types import AdamParams
from tests.trainer.engine_trainer import EngineTrainer
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy

BETA = 0.3
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "dpo": lambda h: -torch.nn.functional.logsigmoid(BETA * h),
    "ipo": lambda h: (h - 1 / (2 * BETA)) ** 2,
}
PAIRS = [
    Preference(id=str(i), prompt=f"w3 w{i + 4} w5", chosen=" ".join([f"w{9 + i}"] * (1 + i)), rejected="w6 w7 w8")
    for i in range(5)
]


@pytest.mark.parametrize("per_microbatch", [1, 3, 10])
@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_the_gradient_is_autograds_of_the_papers_formula(name: str, per_microbatch: int, tmp_path: Path) -> None:
    """Chosen and rejected of a pair in one micro-batch or in two."""
    model = tiny_llama(tmp_path / "model")
    trainer = EngineTrainer(model, per_microbatch)
    batch = preferences_to_data(Renderer(model), PAIRS, max_tokens=100)

    async def step() -> tuple[float, np.ndarray]:
        (reference,) = await reference_logprobs(trainer, [batch], tmp_path / "reference.json")
        for _ in range(2):  # away from the reference, where every difference is 0
            await trainer.forward_backward(batch[::2], "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=3e-3))
        differences = log_ratio_differences(await sequence_logprobs(trainer, batch), reference)
        losses, slopes = PAIR_LOSSES[name](differences, BETA)
        await trainer.forward_backward(weight_pairs(batch, slopes), "cross_entropy")
        return float(losses.sum()), differences

    loss, differences = asyncio.run(step())
    assert np.abs(differences).min() > 0.05

    policy, frozen = ReferencePolicy(model), ReferencePolicy(model)
    by_name = dict(trainer.engine.hf_parameters())
    with torch.no_grad():
        for parameter_name, parameter in policy.model.named_parameters():
            parameter.copy_(by_name[parameter_name])
    total = torch.zeros(())
    for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
        sums = [
            (model.logprobs(datum) * torch.from_numpy(datum.weights)).sum()
            for model in (policy, frozen)
            for datum in (chosen, rejected)
        ]
        total = total + FORMULAS[name]((sums[0] - sums[1]) - (sums[2] - sums[3]).detach())
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-4)
    for parameter_name, gradient in policy.gradients().items():
        ours = by_name[parameter_name].grad
        assert ours is not None
        assert relative_error(ours, gradient) <= 1e-4, parameter_name


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_slopes_are_derivatives_and_large_differences_give_no_nan(name: str) -> None:
    differences = np.array([-1e4, -3.0, 0.0, 0.7, 40.0, 1e4])
    losses, slopes = PAIR_LOSSES[name](differences, BETA)
    wanted = torch.tensor(differences, requires_grad=True)
    FORMULAS[name](wanted).sum().backward()
    assert wanted.grad is not None
    np.testing.assert_allclose(losses, FORMULAS[name](torch.tensor(differences)).numpy(), atol=1e-12)
    np.testing.assert_allclose(slopes, wanted.grad.numpy(), atol=1e-12)


def test_measurements_of_pairs() -> None:
    logprobs, reference = np.array([-1.0, -3.0, -5.0, -4.0, -2.0, -2.5]), np.array([-2.0, -3.0, -6.0, -4.0, -2.0, -2.5])
    measured = measure_pairs(logprobs, reference, PAIR_LOSSES["dpo"], 0.5)
    assert measured["accuracy"].values.tolist() == [1, 0, 1]  # the second pair: rejected is still more probable
    assert measured["reward_accuracy"].values.tolist() == [1, 1, 0.5]  # the third has not moved
    assert measured["margin"].values.tolist() == [0.5, 0.5, 0]
    np.testing.assert_allclose(measured["loss"].values, -np.log(1 / (1 + np.exp([-0.5, -0.5, 0]))))


def test_the_reference_is_computed_once(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    trainer, file = EngineTrainer(model), tmp_path / "reference.json"
    batches = [
        preferences_to_data(Renderer(model), pairs, max_tokens=7) for pairs in (PAIRS[:2], PAIRS[4:], PAIRS[2:3])
    ]
    assert [len(batch) for batch in batches] == [4, 0, 2]  # the pair of the second batch is too long

    async def ask() -> None:
        shorter = await reference_logprobs(trainer, batches[:2], file)
        first = await reference_logprobs(trainer, batches, file)
        for array, before in zip(first, shorter, strict=False):
            np.testing.assert_array_equal(array, before)
        for array, batch in zip(first, batches, strict=True):
            np.testing.assert_array_equal(array, await sequence_logprobs(trainer, batch))
        await trainer.forward_backward(batches[0], "cross_entropy")
        await trainer.optim_step(AdamParams(learning_rate=1e-2))
        for array, again in zip(first, await reference_logprobs(trainer, [], file), strict=True):
            np.testing.assert_array_equal(array, again)

    asyncio.run(ask())
