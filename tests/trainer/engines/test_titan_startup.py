"""The torchtitan engine starts on the CPU without the compiler that it does not use."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.engines.titan._compat import compiled_when_called

START = """
import sys
import trainer.engines.titan.engine
print("torchtitan.models.common.attention" in sys.modules, "torch._inductor.lowering" in sys.modules)
"""


@pytest.mark.seconds
def test_the_engine_is_imported_without_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]


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
