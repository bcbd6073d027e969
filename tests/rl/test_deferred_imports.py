"""What PyTorch imports for its compiler alone waits until something compiles, and works then."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds

_DEFERRED = ("sympy", "networkx", "torch._dynamo.symbolic_convert", "torch._inductor.compile_fx")

_IMPORTS = """
from rl.deferred_imports import defer_compiler
defer_compiler()
import sys
import torch
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.distributed.tensor
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.tensor._ops import _matrix_ops, _tensor_ops

def loaded():
    return sorted({names} & set(sys.modules))
"""

_WITHOUT_COMPILER = """
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh

assert _matrix_ops.guard_or_false(True) is True
assert _tensor_ops.statically_known_true(False) is False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
init_device_mesh("cpu", (1,))
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
torch.optim.AdamW([weight], lr=0.1).step()
print(loaded())
"""

_COMPILING = """
calls = []

@torch.compiler.disable
def as_it_is(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1

@torch.compiler.disable(recursive=False)
def as_it_is_too(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1

torch._dynamo.disallow_in_graph(torch.sub)
assert torch.equal(as_it_is(torch.ones(2)), torch.full((2,), 2.0))
assert loaded() == [], loaded()

graphs = []

def backend(graph, _):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=backend)
def compiled(x):
    return torch.sub(as_it_is_too(as_it_is(x * 3)) * 5, 1) * 7

assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 168.0))
assert calls == [False, False, False], calls
assert len(graphs) == 3, graphs  # x * 3, ... * 5, ... * 7
from torch.fx.experimental import symbolic_shapes
assert _matrix_ops.guard_or_false is symbolic_shapes.guard_or_false
assert symbolic_shapes.__spec__.name == symbolic_shapes.__name__ == "torch.fx.experimental.symbolic_shapes"
from torch.distributed.tensor import _decompositions
assert _decompositions.GuardOnDataDependentSymNode is symbolic_shapes.GuardOnDataDependentSymNode
from torch.distributed.pipelining import schedules
assert isinstance(torch.compile(torch.nn.Linear(2, 2)), schedules.OptimizedModule)
assert torch._dynamo.trace_rules is sys.modules["torch._dynamo.trace_rules"]
print(loaded())
"""


def test_process_groups_and_optimizers_need_no_compiler() -> None:
    assert _run(_IMPORTS + _WITHOUT_COMPILER) == "[]"


def test_what_was_put_off_is_there_once_something_is_compiled() -> None:
    assert _run(_IMPORTS + _COMPILING) != "[]"


def test_a_module_of_a_package_that_is_put_off_finds_the_package_whole() -> None:
    assert "True" in _run(_IMPORTS + "from torch._dynamo.utils import counters\nprint(torch._dynamo.reset is not None)")


def test_what_is_there_already_stays() -> None:
    done = _run(
        "import torch._dynamo\nfrom torch.fx.experimental import symbolic_shapes as before\n"
        "from rl.deferred_imports import defer_compiler\ndefer_compiler()\ndefer_compiler()\n"
        "from torch.fx.experimental import symbolic_shapes as after\nimport sys\n"
        "print(before is after, sum(type(each).__module__ == 'rl.deferred_imports' for each in sys.meta_path))"
    )
    assert done == "True 1"


def _run(script: str) -> str:
    """The last line that a script prints in a process of its own."""
    script = script.replace("{names}", str(set(_DEFERRED)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
