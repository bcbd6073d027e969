"""A gateway whose adapters are those of a real trainer, in this process. The generator stays a toy."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.handles.trainer_handle import TrainerHandle
from ownloop_server.served_models import ServedModel
from plugins.server.tests.running_server import RunningServer, running_server
from plugins.server.tests.toy_model import ToyHost
from rl.lora import LoRAConfig
from tests.meshes_in_process import meshes_in_process
from trainer.config import TrainerConfig


@contextmanager
def real_trainer_server(folder: Path, model: Path, rank: int = 4, **served: Any) -> Generator[RunningServer]:
    """Serves adapters of `model` up to this rank. `served` are fields of `ServedModel`."""
    config = TrainerConfig(model=model, compute_dtype="float32", lora=LoRAConfig(rank=rank))
    launched: list[TrainerHandle] = []
    toy = ToyHost.served

    async def adapter(host: ToyHost, name: str, lora: LoRAConfig) -> Any:
        del host
        if not launched:
            launched.append(await TrainerHandle.launch(config, None, folder / "logs"))
        return await launched[0].adapter(name, lora)

    def as_served(host: ToyHost, recovery: Path, max_snapshots: int = 8) -> ServedModel:
        return replace(toy(host, recovery, max_snapshots), **served)

    with meshes_in_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyHost, "adapter", adapter)
        patch.setattr(ToyHost, "served", as_served)
        with running_server(folder) as running:
            yield running
        launched[0].mesh.actors.stop()
