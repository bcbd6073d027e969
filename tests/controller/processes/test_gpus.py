"""GPUs are given out by the names that CUDA_VISIBLE_DEVICES has for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from controller.commands.recipes import override
from controller.processes.place import GPUPool, gpu_env, gpus_here
from generator.config import GeneratorConfig
from trainer.config import TrainerConfig

EIGHT = tuple("01234567")
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1a2b3c4d-0000-4106-c12f-20bd9faed9f6")
MIGS = ("MIG-63d4a34d-5a05-5f0f-8d4b-3a9f2a3d6a11", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0")


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        ((), (2, 1), [None, None]),
        (("5",), (1, 1, 1), [("5",), ("5",), ("5",)]),
        (("0", "1"), (1, 1), [("0",), ("1",)]),
        (EIGHT, (4, 1, 1, 2), [("0", "1", "2", "3"), ("4",), ("5",), ("6", "7")]),
        (("4", "5", "6", "7"), (2, 1), [("4", "5"), ("6",)]),
        (UUIDS, (1, 1), [UUIDS[:1], UUIDS[1:]]),
        (MIGS, (1, 1), [MIGS[:1], MIGS[1:]]),
    ],
)
def test_gpus_are_given_out_in_the_order_of_the_calls(
    visible: tuple[str, ...], ranks: tuple[int, ...], expected: list[tuple[str, ...] | None]
) -> None:
    pool = GPUPool(visible)
    assert [pool.take(f"mesh-{index}", count) for index, count in enumerate(ranks)] == expected


def test_gpus_are_shared_by_naming_them_alone() -> None:
    pool = GPUPool(EIGHT[:4])
    assert pool.take("trainer", 2, gpus=(1, "2")) == ("1", "2")
    assert pool.take("reference", 2, gpus=(1, 2)) == ("1", "2")
    assert pool.take("generator", 2) == ("0", "3")


@pytest.mark.parametrize("gpus", [(0,), (1, 1), (3, 4), (-1, 0), UUIDS])
def test_wrong_names_are_refused_with_the_visible_ones(
    gpus: tuple[int | str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(
        ValueError,
        match=r"gpus of 'critic' are \[.*\]; it needs 2 different ones, .*visible: 0, 1, 2, 3 "
        r"\(CUDA_VISIBLE_DEVICES is '0,1,2,3'\)",
    ):
        GPUPool(EIGHT[:4]).take("critic", 2, gpus=gpus)


def test_gpu_logic_colocated_meshes_share_the_first_gpus() -> None:
    pool = GPUPool(("0", "1", "2", "3"))
    assert pool.take("judge", 1) == ("0",)
    assert pool.take("trainer", 2, colocated=True) == ("1", "2")
    assert pool.take("generator", 3, num_replicas=3, colocated=True) == ("1", "2", "3")
    with pytest.raises(ValueError, match="'other' needs 1 GPUs, one per rank; 0 of the 4"):
        pool.take("other", 1)
    with pytest.raises(ValueError, match="'reference' needs 4 GPUs, one per rank; 3 of the 4"):
        pool.take("reference", 4, colocated=True)


def test_a_host_without_gpu_has_none_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"gpus of 'trainer' are \[0\]; .* visible: none$"):
        GPUPool(()).take("trainer", 1, gpus=(0,))


def test_too_few_gpus_are_counted_in_the_error() -> None:
    pool = GPUPool(EIGHT[:4])
    pool.take("trainer", 2)
    pool.take("reference", 2)
    with pytest.raises(
        ValueError, match=r"'generator' needs 1 GPUs, .*; 0 of the 4 .*: 'trainer' has 0, 1, 'reference' has 2, 3$"
    ):
        pool.take("generator", 1)
    with pytest.raises(
        ValueError, match=r"'trainer' needs 2 GPUs, one per rank; 1 of the 1 that are visible.* are free"
    ):
        GPUPool(("0",)).take("trainer", 2)


def test_a_mesh_of_several_ranks_on_mig_instances_is_refused() -> None:
    assert GPUPool(MIGS).take("generator", 2, num_replicas=2) == MIGS
    with pytest.raises(ValueError, match=r"'trainer' has 2 ranks .* a mesh on MIG must have one rank"):
        GPUPool(MIGS).take("trainer", 2)


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [
        (None, 3, ("0", "1", "2")),
        (None, 0, ()),
        ("", 0, ()),
        ("4,5,6,7", 4, ("4", "5", "6", "7")),
        ("6, 2", 2, ("6", "2")),
        ("0,1", 0, ()),  # a host without driver
        ("1,-1,2", 1, ("1",)),  # CUDA stops at the first name that is no GPU
        (",".join(UUIDS), 2, UUIDS),
    ],
)
def test_visible_gpus_have_the_names_of_the_variable(
    variable: str | None, count: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert gpus_here() == expected


@pytest.mark.parametrize("has_driver", [True, False])
def test_mig_instances_are_visible_where_there_is_a_driver(
    has_driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    if has_driver:
        driver.touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(MIGS))
    assert gpus_here(driver) == (MIGS if has_driver else ())


def test_a_mesh_sees_its_own_gpus_alone() -> None:
    assert gpu_env(("4", "5")) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert gpu_env(None) == {}


@pytest.mark.seconds
def test_cuda_stays_uninitialized_in_the_controller() -> None:
    code = "import torch; from controller.processes import place; place.gpus_here(); print(torch.cuda.is_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == "False\n"


def test_the_command_line_takes_numbers_and_names() -> None:
    config = override(TrainerConfig(), ["--data-parallel-shard", "2", "--gpus", "4", UUIDS[0]], "ownloop")
    assert config.gpus == (4, UUIDS[0])


def test_gpus_must_be_as_many_as_ranks() -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig.gpus is \[0, 1\]; it must name 1 different GPUs"):
        TrainerConfig(gpus=(0, 1))
    with pytest.raises(ValueError, match=r"GeneratorConfig.gpus is \[3, 3\]; it must name 2 different GPUs"):
        GeneratorConfig(num_replicas=2, gpus=(3, 3))
