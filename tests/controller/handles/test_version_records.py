"""The controller's copy of version records."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import torch

from controller.handles.generator_handle import GeneratorHandle
from controller.handles.trainer_handle import TrainerHandle
from controller.processes.mesh import Mesh
from controller.processes.rank_processes import RankProcesses
from generator.config import GeneratorConfig
from rl.tiny_models import tiny_llama
from rl.weights.version import Manifest, VersionRecord, VersionRecords
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits

RECORD = VersionRecord(
    version=0,
    push_index=0,
    manifest=Manifest(),
    dtype=torch.float32,
    transport="torchstore",
    host="",
)


def test_a_record_is_found_until_two_newer_ones_exist() -> None:
    version_records = VersionRecords()
    assert version_records.find(0) is None
    records = [dataclasses.replace(RECORD, version=v, push_index=p) for p, v in enumerate((3, 4, 4, 5))]
    for record in records[:3]:
        version_records.add(record)
    assert version_records.find(4) is records[2]
    assert version_records.find(3) is None
    version_records.add(records[3])
    assert [version_records.find(version) for version in (4, 5, 6)] == [records[2], records[3], None]


class FakeMesh(Mesh):
    """One rank that records its calls and always gives the same answer."""

    def __init__(self, result: Any) -> None:
        super().__init__("fake", None, None, RankProcesses((), (Path("/nowhere/0.log"),)))
        self.sent: list[tuple[Any, ...]] = []
        self._result = result

    def rank(self, index: int) -> "FakeMesh":
        return self

    def packed(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del verb
        return args

    def send(self, verb: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        self.sent.append(arguments)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(self._result)
        return answer


async def test_a_pull_sends_the_record_of_a_pushed_version_alone(tmp_path: Path) -> None:
    model, version_records = tiny_llama(tmp_path / "model"), VersionRecords()
    record = dataclasses.replace(RECORD, version=7)
    pushing = FakeMesh(record)
    pulling = FakeMesh({})
    limits, config = ModelLimits(vocab_size=1, max_seq_len=1), TrainerConfig(model=model)
    trainer = TrainerHandle(
        mesh=pushing,
        config=config,
        limits=limits,
        version_records=version_records,
        share_prefixes=False,
        pushes=True,
    )
    generator = GeneratorHandle(pulling, GeneratorConfig(model=model), version_records)

    assert await trainer.push_model_state_dict() == 7
    await generator.pull_model_state_dict(7)
    await generator.pull_model_state_dict(6, mode="inflight", keep_prefix_cache=True)
    assert pulling.sent == [(7, record, None, False, "drain", False), (6, None, None, False, "inflight", True)]
