"""Pulls into a model on a GPU: recorded once, then one call. The CPU stands for the GPU."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from generator import pull
from generator.pull import CopyPlan, CopyRecorder
from rl.system.hardware import host_identity
from rl.weights import shared_memory
from rl.weights.memory import WeightBuffer
from rl.weights.shared_memory import Workers
from rl.weights.version import Manifest, VersionRecord, buffer_size, build_manifest

pytestmark = pytest.mark.vllm

MANIFEST = build_manifest((name, (4, 6), torch.bfloat16) for name in ("gate", "up", "down"))


class Fused(nn.Module):
    """Loads as vLLM does: two tensors into one parameter, and of a third the columns of the first of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            part = {"gate": self.gate_up[:4], "up": self.gate_up[4:], "down": self.down}[name]
            part.data.copy_(tensor.narrow(1, 0, 3) if name == "down" else tensor)


class Joined(Fused):
    """Joins two tensors before it loads them, as vLLM does for a few models."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(tensors)
        self.gate_up.data.copy_(torch.cat([found["gate"], found["up"]]))


def record(version: int) -> VersionRecord:
    return VersionRecord(
        version=version,
        push_index=version,
        manifest=MANIFEST,
        dtype=torch.bfloat16,
        transport="shared_memory",
        host=host_identity(),
    )


def test_gpu_logic_a_pull_is_recorded_once_and_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pull, "on_gpu", lambda tensors: bool(list(tensors)))
    calls: list[int] = []
    copy = shared_memory.copy

    def counted(pairs: list[shared_memory.Pair]) -> None:
        calls.append(len(pairs))
        copy(pairs)

    monkeypatch.setattr(pull, "copy", counted)
    memory, model, workers = WeightBuffer.create(buffer_size(MANIFEST)), Fused(), Workers()
    plan: CopyPlan | None = None
    for version in (1, 2, 3):
        torch.manual_seed(version)
        weights = {spec.name: torch.randn(spec.shape).bfloat16() for spec in MANIFEST}
        for spec in MANIFEST:
            memory.tensor(spec).copy_(weights[spec.name])
        if plan is None:
            with CopyRecorder(memory, record(version)) as recorder:
                model.load_weights((spec.name, memory.tensor(spec)) for spec in MANIFEST)
            plan = CopyPlan(model, record(version), recorder)
        else:
            assert plan.fits(record(version))
            plan.load(memory, workers, frozen=True)
        assert torch.equal(model.gate_up, torch.cat([weights["gate"], weights["up"]]))
        assert torch.equal(model.down, weights["down"][:, :3])
    assert calls == [3, 3]
    memory.close()


def test_frozen_tensors_can_be_left_as_they_are() -> None:
    """Also a part of a parameter: it is copied from its own part of the memory."""
    manifest = Manifest(replace(spec, frozen=spec.name != "gate") for spec in MANIFEST)
    memory, model, workers = WeightBuffer.create(buffer_size(MANIFEST)), Fused(), Workers()
    first, second = ({spec.name: torch.randn(spec.shape).bfloat16() for spec in MANIFEST} for _ in range(2))
    for spec in MANIFEST:
        memory.tensor(spec).copy_(first[spec.name])
    with CopyRecorder(memory, replace(record(1), manifest=manifest)) as recorder:
        model.load_weights((spec.name, memory.tensor(spec)) for spec in MANIFEST)
    plan = CopyPlan(model, record(1), recorder)
    for spec in MANIFEST:
        memory.tensor(spec).copy_(second[spec.name])
    for frozen, others in ((False, first), (True, second)):
        plan.load(memory, workers, frozen=frozen)
        assert torch.equal(model.gate_up, torch.cat([second["gate"], others["up"]]))
        assert torch.equal(model.down, others["down"][:, :3])
    memory.close()


@pytest.mark.parametrize(("model", "complete"), [(Fused, True), (Joined, False)])
def test_values_computed_of_published_tensors_are_refused(model: type[Fused], complete: bool) -> None:
    memory = WeightBuffer.create(buffer_size(MANIFEST))
    with CopyRecorder(memory, record(1)) as recorder:
        model().load_weights((spec.name, memory.tensor(spec)) for spec in MANIFEST)
    assert recorder.complete == complete
    memory.close()
