"""The torchtitan engine starts without what it does not use: torchtitan's own loop, and on the CPU the compiler."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.tiny_models import tiny_llama
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.plain_ranks import spawn
from trainer.engines.titan._compat import compiled_when_called, without_torchtitans_loop

START = """
import asyncio
import sys
from pathlib import Path
from rl.deferred_imports import defer_compiler
defer_compiler()
import numpy as np
from rl.types import AdamParams, Datum
from tests.trainer.engine_trainer import EngineTrainer

async def steps():
    trainer = EngineTrainer(Path(sys.argv[1]))
    tokens = np.arange(5)
    await trainer.forward_backward([Datum(tokens=tokens, loss_inputs={"target_tokens": tokens + 1})], "cross_entropy")
    await trainer.optim_step(AdamParams(learning_rate=1e-3))

asyncio.run(steps())
names = {"networkx", "sympy", "torch._dynamo.symbolic_convert", "torch._inductor.lowering"}
print("torchtitan.models.common.attention" in sys.modules, *sorted(names & set(sys.modules)))
"""


@pytest.mark.seconds
def test_the_engine_trains_without_the_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, str(tiny_llama(tmp_path / "model"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


def test_a_function_is_compiled_once_when_it_is_first_called() -> None:
    compiler, graphs = torch.compile, []

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2

    with compiled_when_called():
        doubled: Any = torch.compile(double, backend=count)
    assert torch.compile is compiler
    assert doubled.__name__ == "double"
    assert not graphs
    for value in (1.5, 2.5):
        assert torch.equal(doubled(torch.tensor([value])), torch.tensor([2 * value]))
    assert len(graphs) == 1


@pytest.mark.ranks
def test_ranks_are_built_without_torchtitans_loop(tmp_path: Path) -> None:
    spawn(2, _build_two_ranks, tiny_llama(tmp_path / "model"))


def _build_two_ranks(_: int, model: Path) -> None:
    load_engine(TrainerConfig(model=model, data_parallel_shard=2))
    assert not {"torchtitan.trainer", "datasets"} & sys.modules.keys()


def test_what_imports_torchtitans_loop_later_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name, loop = "torchtitan.trainer", ModuleType("torchtitan.trainer")
    monkeypatch.delitem(sys.modules, name, raising=False)
    with without_torchtitans_loop():
        from torchtitan.trainer import Trainer
    assert not isinstance(TrainerConfig(model=Path("model")), Trainer.Config)
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, loop)
    with without_torchtitans_loop():
        assert sys.modules[name] is loop
    assert sys.modules[name] is loop
