"""What adapters ask of the processes of a run: a trainer and a generator that fit, and calls that name the adapter."""

from pathlib import Path
from typing import Any

from generator.config import GeneratorConfig, LoRALimits
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.protocols import Generator
from rl.types import Completion
from trainer.config import TrainerConfig

POLICY = "policy"
"""The name of a loop's adapter: what a trainer is that was started with `TrainerConfig.lora`."""


class BoundGenerator:
    """Implements `rl.protocols.Generator`. A call that names no policy is about the adapter of this name.

    `unbound` is the generator itself: a call of it that names no policy is about the base model. Eight tasks that train
    an adapter each give their loop `BoundGenerator(unbound, name)`.
    """

    def __init__(self, unbound: Generator, name: str) -> None:
        """`name` is an adapter's. It need not have been pulled yet."""
        self.unbound = unbound
        self.name = name

    async def generate(self, *args: Any, policy: Policy = None, **options: object) -> list[Completion]:
        """Samples from the adapter; see `rl.protocols.Generator`."""
        return await self.unbound.generate(*args, policy=policy or self.name, **options)

    async def pull_model_state_dict(self, version: int, *, policy: LivePolicy = None, **options: Any) -> None:
        """Loads exactly this version of the adapter; see `rl.protocols.Generator`."""
        await self.unbound.pull_model_state_dict(version, policy=policy or self.name, **options)

    async def drop_policy(self, policy: Policy) -> None:
        """Forgets an adapter's newest version, or a frozen one; see `rl.protocols.Generator`."""
        await self.unbound.drop_policy(policy)


def check_lora(trainer: TrainerConfig, generator: GeneratorConfig) -> None:
    """Raises ValueError unless the generator can serve what the trainer trains: the model itself, or adapters."""
    lora, room = trainer.lora, generator.lora
    if lora is None or room is None:
        if lora is room:
            return
        given, missing = ("TrainerConfig", "GeneratorConfig") if room is None else ("GeneratorConfig", "TrainerConfig")
        raise ValueError(
            f"{given}.lora is set and {missing}.lora is None; set both to train adapters, or neither to train the model"
        )
    if lora.rank > room.max_rank:
        raise ValueError(
            f"TrainerConfig.lora.rank is {lora.rank}; GeneratorConfig.lora.max_rank is {room.max_rank}, and must be at "
            "least as high"
        )
    if trainer.train_vision and not room.vision:
        raise ValueError("TrainerConfig.train_vision is True, with lora; GeneratorConfig.lora.vision must be True, too")


def check_same_base(lora: LoRAConfig | LoRALimits | None, base: Path | None, model: Path) -> Path | None:
    """The model that adapters are over: `model` with `lora`, else `base`, which has been so far.

    Raises ValueError if the two differ, because what is trained over one is of no use over the other.
    """
    if lora is None:
        return base
    if base is not None and base.resolve() != model.resolve():
        raise ValueError(
            f"model is {model}, and this launcher's adapters are over {base}; start the trainer and the generator with "
            "the same directory"
        )
    return model
