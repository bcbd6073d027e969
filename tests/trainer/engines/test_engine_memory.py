"""What every engine must do about memory: report its peaks and, on an accelerator, free what is offloaded."""

import mmap
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import AdamParams
from tests.trainer.engine_params import ENGINE_PARAMS
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine, PeakMemory

PARAMS = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
BATCH = random_batch((1, 17, 5, 40, 12, 7))
MICROBATCHES = [BATCH[:3], [], BATCH[3:]]

Build = Callable[[], Engine]


@pytest.fixture(params=[True, False], ids=["llama_tied", "qwen3_untied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    return tiny_llama(path) if request.param else tiny_qwen3(path, tied=False)


@pytest.fixture(params=ENGINE_PARAMS)
def build(request: pytest.FixtureRequest, model: Path) -> Build:
    """Makes engines of one kind, all of them with the same weights."""
    return lambda: load_engine(TrainerConfig(model=model, engine=request.param, compute_dtype="float32"))


def step(engine: Engine) -> None:
    engine.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    engine.optim_step(PARAMS, 0.01)


def assert_same_parameters(one: Engine, other: Engine) -> None:
    for (name, parameter), (other_name, expected) in zip(one.hf_parameters(), other.hf_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(parameter.cpu(), expected.cpu())


@pytest.mark.gpu
def test_offloaded_state_leaves_the_accelerator_and_comes_back(build: Build) -> None:
    engine, untouched = build(), build()
    for each in (engine, untouched):
        step(each)
        each.forward_backward([BATCH[:3]], get_loss("cross_entropy"))
    before = torch.cuda.memory_allocated()
    engine.to("cpu", model=True, gradients=True, optimizer=True)
    size = sum(p.numel() * 4 for _, p in engine.hf_parameters())
    assert all(p.is_pinned() for _, p in engine.hf_parameters()), "other memory takes ten times as long"
    assert before - torch.cuda.memory_allocated() >= 4 * size
    for each in (engine, untouched):
        each.forward_backward([BATCH[3:]], get_loss("cross_entropy"))
        each.optim_step(PARAMS, 0.01)
    assert all(p.device.type == "cpu" for _, p in engine.hf_parameters())
    engine.to("cuda", model=True, optimizer=True)
    assert_same_parameters(engine, untouched)


@pytest.mark.seconds
def test_a_step_reports_the_peak_memory_of_every_phase(build: Build) -> None:
    engine = build()
    call = engine.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert call.metrics["memory_peak_bytes_max"] == pytest.approx(resident, rel=0.05)
    engine.forward(MICROBATCHES)
    with engine.memory.phase("load"):
        allocate_mib(200)
    with engine.memory.phase("load"):
        pass  # the most of two
    peaks = engine.optim_step(PARAMS).metrics
    phases = {f"memory_peak_bytes_{phase}_max" for phase in ("forward_backward", "forward", "load", "optim_step")}
    assert peaks.keys() == phases
    assert peaks["memory_peak_bytes_load_max"] - peaks["memory_peak_bytes_optim_step_max"] > 150 << 20
    engine.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    assert len(engine.optim_step(PARAMS).metrics) == 2


def test_a_process_that_computes_for_this_one_counts() -> None:
    command = [sys.executable, "-c", "held = b'x' * (100 << 20); print(flush=True); input()"]
    cpu = torch.device("cpu")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        memory, alone = PeakMemory(cpu, children=(child.pid,)), PeakMemory(cpu)
        with memory.phase("forward"):
            pass
        held = memory.take()["memory_peak_bytes_forward_max"] - alone.peak_bytes()
        assert 90 << 20 < held < 150 << 20
        child.communicate(b"end")
    assert memory.peak_bytes() == pytest.approx(alone.peak_bytes(), rel=0.01)


def allocate_mib(size: int) -> None:
    """Takes memory from the kernel and gives it back; malloc might hand out pages that the process holds already."""
    with mmap.mmap(-1, size << 20) as memory:
        for page in range(0, size << 20, mmap.PAGESIZE):
            memory[page] = 1
