"""A launcher refuses mistakes before any process starts."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from controller.handles.trainer_handle import TrainerHandle
from controller.launching.assignments import Assignments
from controller.launching.launcher import Launcher, launch
from controller.processes.errors import MeshError
from generator.config import GeneratorConfig
from rl.system.timeline import show_progress_with
from rl.tiny_models import SERVABLE, tiny_llama
from tests.controller.handles.fake_ranks import FakeMesh, handle_of
from tests.waiting import until
from trainer.config import TrainerConfig


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
        (
            TrainerConfig(head_dtype="float32"),
            GeneratorConfig(max_model_len=64),
            "logits are computed in float32 and in bfloat16; set both or neither",
        ),
        (TrainerConfig(model=Path("elsewhere")), GeneratorConfig(), "TrainerConfig.model is elsewhere; leave it out"),
    ],
)
def test_an_impossible_configuration_is_refused_at_once(
    trainer: TrainerConfig, generator: GeneratorConfig, message: str, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model")

    async def start() -> None:
        async with launch(model, trainer, generator, tmp_path / "logs"):
            raise AssertionError("it started")

    with pytest.raises(ValueError, match=message):
        asyncio.run(start())
    assert not (tmp_path / "logs").exists()


@pytest.mark.stranger("2.F6")
def test_more_ranks_than_cores_can_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.launching.assignments.gpus_here", tuple)
    most = 8 * len(os.sched_getaffinity(0))
    for made in (
        lambda n: Assignments().trainer("trainer", TrainerConfig(data_parallel_shard=n)),
        lambda n: Assignments().generators("generator", GeneratorConfig(num_replicas=n)),
        lambda n: Assignments().trainer("trainer", TrainerConfig(num_threads=n)),
    ):
        made(most)
        with pytest.raises(ValueError, match=rf" {most + 1}( ranks)?,.* at most {most}"):
            made(most + 1)


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


def test_gpus_that_are_not_visible_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.launching.assignments.gpus_here", lambda: ("4", "5"))

    def start(launcher: Launcher, model: Path) -> None:
        launcher.trainer(model, TrainerConfig(data_parallel_shard=2, gpus=(4, 5)))
        launcher.trainer(model, TrainerConfig(gpus=(0,)), name="reference")

    refused(start, r"gpus of 'reference' are \[0\]; it needs 1 .*visible: 4, 5", tmp_path)


async def test_every_mesh_gets_the_gpus_that_its_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the environment of the processes; that CUDA obeys it needs a GPU to see."""
    spawned: dict[str, str] = {}

    async def spawn(name: str, *_: object, env: dict[str, str], **__: object) -> None:
        spawned[name] = env["CUDA_VISIBLE_DEVICES"]
        raise ConnectionError("no processes in this test")

    monkeypatch.setattr("controller.launching.assignments.gpus_here", lambda: ("2", "3", "4", "5", "6", "7"))
    monkeypatch.setattr("controller.processes.mesh.Mesh.spawn", spawn)
    model = tiny_llama(tmp_path / "model", **SERVABLE)

    async with Launcher(tmp_path / "logs") as launcher:
        starts = (
            launcher.trainer(model, TrainerConfig(data_parallel_shard=2)),
            launcher.trainer(model, TrainerConfig(gpus=(3,)), name="reference"),
            launcher.generator(model, GeneratorConfig(max_model_len=64, num_replicas=2, gpus=(6, 7))),
        )
        await asyncio.gather(*starts, return_exceptions=True)
    assert {name: gpus for name, gpus in spawned.items() if "store" not in name} == {
        "trainer": "2,3",
        "reference": "3",
        "generator-0": "6",
        "generator-1": "7",
    }


async def test_a_trainer_is_started_again_after_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"))
    failures = [None, MeshError("trainer", "its processes did not start"), None]
    meshes: list[FakeMesh] = []

    async def start(*_: object, **__: object) -> TrainerHandle:
        if (failure := failures.pop(0)) is not None:
            raise failure
        meshes.append(FakeMesh(1))
        return handle_of(meshes[-1], config)

    monkeypatch.setattr("controller.handles.trainer_handle.TrainerHandle.launch", start)

    async with Launcher(tmp_path / "logs") as launcher:
        await launcher.trainer(config.model, config)
        with pytest.raises(MeshError, match="did not start"):
            await launcher.restart_trainer()
        assert (await launcher.restart_trainer()).mesh is meshes[1]


async def test_a_start_that_failed_gives_back_its_name_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model", **SERVABLE), data_parallel_shard=2)
    serving = GeneratorConfig(max_model_len=64)
    failures = [MeshError("trainer", "its processes did not start"), None]
    given: list[object] = []

    async def start(*_: object, gpus: object, **__: object) -> TrainerHandle:
        given.append(gpus)
        if (failure := failures.pop(0)) is not None:
            raise failure
        return handle_of(FakeMesh(2), config)

    async def store(*_: object, **__: object) -> FakeMesh:
        return FakeMesh(1)

    monkeypatch.setattr("controller.launching.assignments.gpus_here", lambda: ("4", "5"))
    monkeypatch.setattr("controller.handles.trainer_handle.TrainerHandle.launch", start)
    monkeypatch.setattr("controller.handles.store.WeightStore.launch", store)

    async with Launcher(tmp_path / "logs") as launcher:
        with pytest.raises(MeshError, match="did not start"):
            await launcher.trainer(config.model, config, generator=serving)
        await launcher.trainer(config.model, config, generator=serving)
        with pytest.raises(ValueError, match="name is 'trainer', which is taken"):
            launcher.trainer(config.model, config)
    assert given == [("4", "5")] * 2


@pytest.mark.virtual
async def test_a_store_whose_start_was_cut_off_leaves_its_name_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, names = tiny_llama(tmp_path / "model", **SERVABLE), list[str]()

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def start(*arguments: object, **_: object) -> None:
        names.append(str(arguments[-1]))
        await never()

    monkeypatch.setattr("controller.handles.generator_handle.GeneratorHandle.launch", never)
    monkeypatch.setattr("controller.handles.store.WeightStore.launch", start)
    for number in (1, 2):
        async with Launcher(tmp_path / "logs") as launcher:
            launcher.generator(model, GeneratorConfig(max_model_len=64))
            await until(lambda number=number: len(names) == number, "the start of the store")
    assert names[0] != names[1]


@pytest.mark.virtual
async def test_an_end_that_is_interrupted_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"))
    ending, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class SlowMesh(FakeMesh):
        async def stop(self) -> None:
            ending.set()
            await go_on.wait()
            ended.set()

    async def start(*_: object, **__: object) -> TrainerHandle:
        return handle_of(SlowMesh(1), config)

    monkeypatch.setattr("controller.handles.trainer_handle.TrainerHandle.launch", start)

    async def cell() -> None:
        async with Launcher(tmp_path / "logs") as launcher:
            await launcher.trainer(config.model, config)

    running = asyncio.create_task(cell())
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go_on.set()
    await ended.wait()


@pytest.mark.stranger("F8")
async def test_the_user_is_told_how_many_processes_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"))
    told: list[tuple[str, int, int]] = []

    async def start(*_: object, **options: object) -> TrainerHandle:
        if options["name"] == "broken":
            raise MeshError("broken", "its processes did not start")
        return handle_of(FakeMesh(1), config)

    monkeypatch.setattr("controller.handles.trainer_handle.TrainerHandle.launch", start)

    show_progress_with(lambda *progress: told.append(progress))
    async with Launcher(tmp_path / "logs") as launcher:
        starts = [launcher.trainer(config.model, config, name=name) for name in ("one", "broken", "other")]
        await asyncio.gather(*starts, return_exceptions=True)
    assert told == [("one is ready", 1, 3), ("other is ready", 2, 3)]


_STARTS = """
import asyncio, os, sys
from pathlib import Path
from controller.launching.launcher import Launcher
from controller.processes.mesh import Mesh
from generator.config import GeneratorConfig
from trainer.config import TrainerConfig

async def spawn(name, actor, *args, **options):
    print(name, "torch" in sys.modules, flush=True)
    if name == "generator":
        os._exit(0)
    await asyncio.sleep(60)

async def main(model):
    Mesh.spawn = spawn
    async with Launcher(model / "logs") as launcher:
        config = GeneratorConfig(dtype="float32", max_model_len=64)
        starts = launcher.trainer(model, TrainerConfig(), generator=config), launcher.generator(model, config)
        await asyncio.gather(*starts)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.seconds
@pytest.mark.skipif(
    not version("torch").endswith("+cpu") and os.environ.get("CUDA_VISIBLE_DEVICES") != "",
    reason="hardware: another build of torch is asked for GPUs first",
)
def test_processes_start_before_the_controller_loads_torch(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SERVABLE)
    command = [sys.executable, "-c", _STARTS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["trainer False", "generator False"], done.stdout
