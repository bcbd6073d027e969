"""A launcher refuses mistakes before any process starts, and gives out GPUs."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.meshes.gpus import GPUPool
from controller.meshes.launch import Launcher, launch
from generator.config import GeneratorConfig
from rl.tiny_models import tiny_llama
from trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "expected"),
    [
        (0, (2, 1), [None, None]),
        (1, (1, 1, 1), [(0,), (0,), (0,)]),
        (2, (1, 1), [(0,), (1,)]),
        (8, (4, 1, 1, 2), [(0, 1, 2, 3), (4,), (5,), (6, 7)]),
    ],
)
def test_gpus_are_given_out_in_the_order_of_the_calls(
    num_gpus: int, ranks: tuple[int, ...], expected: list[tuple[int, ...] | None]
) -> None:
    pool = GPUPool(num_gpus)
    assert [pool.take(f"mesh-{index}", count) for index, count in enumerate(ranks)] == expected


def test_gpus_can_be_shared_by_naming_them() -> None:
    pool = GPUPool(4)
    assert pool.take("trainer", 2) == (0, 1)
    assert pool.take("reference", 2, gpus=(0, 1)) == (0, 1)
    assert pool.take("generator", 2) == (2, 3)
    for gpus in ((0,), (1, 1), (3, 4)):
        with pytest.raises(
            ValueError, match=r"gpus of 'critic' are \[.*\]; it needs 2 different ones of this host's 4"
        ):
            pool.take("critic", 2, gpus=gpus)


def test_too_few_gpus_are_counted_in_the_error() -> None:
    pool = GPUPool(4)
    pool.take("trainer", 2)
    pool.take("reference", 2)
    with pytest.raises(ValueError, match=r"has 4 GPUs; 'generator' needs 1, .*2 for 'trainer', after 2 .* makes 5"):
        pool.take("generator", 1)
    with pytest.raises(ValueError, match=r"this host has 1 GPUs; 'trainer' needs 2, one per rank, which makes 2"):
        GPUPool(1).take("trainer", 2)


def refused(start: Callable[[Launcher, Path], object], message: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")

    async def main() -> None:
        async with Launcher(tmp_path / "logs") as launcher:
            start(launcher, model)
            raise AssertionError("nothing was refused")

    with pytest.raises(ValueError, match=message):
        asyncio.run(main())
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("trainer", "generator", "message"),
    [
        (TrainerConfig(tensor_parallel=3), GeneratorConfig(max_model_len=64), "TrainerConfig.tensor_parallel is 3"),
        (TrainerConfig(), GeneratorConfig(max_model_len=64, tensor_parallel=3), "GeneratorConfig.tensor_parallel is 3"),
        (TrainerConfig(), GeneratorConfig(max_model_len=10**6), "max_model_len is 1000000"),
        (TrainerConfig(model=Path("elsewhere")), GeneratorConfig(), "TrainerConfig.model is elsewhere; leave it out"),
    ],
)
def test_an_impossible_configuration_is_refused_before_any_process_starts(
    trainer: TrainerConfig, generator: GeneratorConfig, message: str, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model")

    async def start() -> None:
        async with launch(model, trainer, generator, tmp_path / "logs"):
            raise AssertionError("it started")

    with pytest.raises(ValueError, match=message):
        asyncio.run(start())
    assert not (tmp_path / "logs").exists()


def test_a_refused_call_keeps_earlier_calls_from_starting(tmp_path: Path) -> None:
    def start(launcher: Launcher, model: Path) -> None:
        launcher.trainer(model, TrainerConfig())
        launcher.trainer(model, TrainerConfig(), name="reference")
        launcher.generator(model, GeneratorConfig(max_model_len=64, tensor_parallel=3))

    refused(start, "GeneratorConfig.tensor_parallel is 3", tmp_path)


def test_a_name_is_taken_only_once(tmp_path: Path) -> None:
    def start(launcher: Launcher, model: Path) -> None:
        launcher.trainer(model, TrainerConfig())
        launcher.trainer(model, TrainerConfig())

    refused(start, "name is 'trainer', which is taken", tmp_path)


def test_only_one_trainer_pushes(tmp_path: Path) -> None:
    def start(launcher: Launcher, model: Path) -> None:
        generator = GeneratorConfig(max_model_len=64)
        launcher.trainer(model, TrainerConfig(), generator=generator)
        launcher.trainer(model, TrainerConfig(), generator=generator, name="critic")

    refused(start, "generator of 'critic': 'trainer' pushes already", tmp_path)
