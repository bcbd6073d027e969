"""Trainers and generators that do not fit are refused, and a bound generator names its adapter in every call."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.handles.adapters import BoundGenerator
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig, LoRALimits
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.tiny_models import SERVABLE, tiny_llama
from rl.types import SamplingParams
from trainer.config import TrainerConfig

ADAPTER = TrainerConfig(lora=LoRAConfig(rank=32))


@pytest.mark.parametrize(
    ("trainer", "room", "message"),
    [
        (ADAPTER, None, "TrainerConfig.lora is set and GeneratorConfig.lora is None"),
        (TrainerConfig(), LoRALimits(), "GeneratorConfig.lora is set and TrainerConfig.lora is None"),
        (replace(ADAPTER, train_vision=True), LoRALimits(), "GeneratorConfig.lora.vision must be True, too"),
        (ADAPTER, LoRALimits(max_rank=16), "TrainerConfig.lora.rank is 32; GeneratorConfig.lora.max_rank is 16"),
    ],
)
def test_a_trainer_and_a_generator_that_do_not_fit_are_refused(
    trainer: TrainerConfig, room: LoRALimits | None, message: str, tmp_path: Path
) -> None:
    _refused(lambda launcher, model: launcher.trainer(model, trainer, generator=_generator(room)), message, tmp_path)


def test_the_reference_of_an_adapter_is_its_trainer(tmp_path: Path) -> None:
    message = "no trainer was started with this model and configuration; call `trainer` first"
    _refused(lambda launcher, model: launcher.reference(model, ADAPTER), message, tmp_path)

    def other_rank(launcher: Launcher, model: Path) -> None:
        launcher.trainer(model, TrainerConfig(lora=LoRAConfig(rank=8)))
        launcher.reference(model, ADAPTER)

    _refused(other_rank, message, tmp_path)


@pytest.mark.parametrize("trainer_first", [True, False])
def test_adapters_over_one_model_are_not_served_over_another(trainer_first: bool, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", **SERVABLE)

    def start(launcher: Launcher, model: Path) -> None:
        serving = _generator(LoRALimits())
        starts: list[Callable[[], object]] = [
            lambda: launcher.trainer(model, ADAPTER, generator=serving),
            lambda: launcher.generator(other, serving),
        ]
        for each in starts if trainer_first else reversed(starts):
            each()

    message = "this launcher's adapters are over .*; start the trainer and the generator with the same directory"
    _refused(start, message, tmp_path)


def _generator(room: LoRALimits | None) -> GeneratorConfig:
    return GeneratorConfig(max_model_len=64, lora=room)


def _refused(start: Callable[[Launcher, Path], object], message: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SERVABLE)

    async def main() -> None:
        async with Launcher(tmp_path / "logs") as launcher:
            start(launcher, model)
            raise AssertionError("nothing was refused")

    with pytest.raises(ValueError, match=message):
        asyncio.run(main())
    assert not (tmp_path / "logs").exists()


class _Noting:
    """Notes the policy of every call."""

    def __init__(self) -> None:
        self.policies: list[Policy] = []

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Any]:
        self.policies.append(policy)
        return []

    async def pull_model_state_dict(self, version: int, *, policy: LivePolicy = None, **options: Any) -> None:
        assert options == {"frozen": True, "mode": "inflight", "keep_prefix_cache": True}
        self.policies.append(policy)

    async def drop_policy(self, policy: Policy) -> None:
        self.policies.append(policy)


async def test_a_bound_generator_names_its_adapter_by_default() -> None:
    generator = _Noting()
    bound = BoundGenerator(BoundGenerator(generator, "other"), "mine")

    for policy in (None, ("mine", 3), "yours"):
        await bound.generate([1], SamplingParams(max_tokens=1), policy=policy)
    for policy in (None, "yours"):
        await bound.pull_model_state_dict(1, policy=policy, frozen=True, mode="inflight", keep_prefix_cache=True)
    await bound.drop_policy(("mine", 3))
    assert generator.policies == ["mine", ("mine", 3), "yours", "mine", "yours", ("mine", 3)]
