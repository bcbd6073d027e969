import asyncio
from pathlib import Path

import pytest

from controller.launch import assign_gpus, launch
from generator.config import GeneratorConfig
from tests.tiny_models import tiny_llama
from trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("num_gpus", "trainer", "generator", "expected"),
    [
        (0, 2, 1, (None, None)),
        (1, 1, 1, ((0,), (0,))),
        (8, 4, 2, ((0, 1, 2, 3), (4, 5))),
        (2, 1, 1, ((0,), (1,))),
    ],
)
def test_trainer_and_generator_get_gpus_of_their_own(
    num_gpus: int, trainer: int, generator: int, expected: tuple[object, object]
) -> None:
    assert assign_gpus(num_gpus, trainer, generator) == expected


def test_too_few_gpus_are_counted_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"this host has 4 GPUs; the trainer has 4 ranks and the generator 1 .*need 5"):
        assign_gpus(4, 4, 1)


@pytest.mark.parametrize(
    ("trainer", "generator", "message"),
    [
        (TrainerConfig(tensor_parallel=3), GeneratorConfig(max_model_len=64), "TrainerConfig.tensor_parallel is 3"),
        (TrainerConfig(), GeneratorConfig(max_model_len=64, tensor_parallel=3), "GeneratorConfig.tensor_parallel is 3"),
        (TrainerConfig(), GeneratorConfig(max_model_len=10**6), "max_model_len is 1000000"),
        (TrainerConfig(model=Path("elsewhere")), GeneratorConfig(), "TrainerConfig.model is elsewhere; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process(
    trainer: TrainerConfig, generator: GeneratorConfig, message: str, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model")

    async def start() -> None:
        async with launch(model, trainer, generator, tmp_path / "logs"):
            raise AssertionError("it started")

    with pytest.raises(ValueError, match=message):
        asyncio.run(start())
    assert not (tmp_path / "logs").exists()
