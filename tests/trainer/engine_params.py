"""All engines as parameters of tests; those whose package is not installed here are skipped.

`megatron_fsdp` needs CUDA and has tests of its own, in the plug-in `megatron`. On GPUs `bitwise` has them too.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch

from trainer.engine_table import all_engines

_ELSEWHERE = ("megatron_fsdp", "bitwise") if torch.cuda.is_available() else ("megatron_fsdp",)
_EVERYWHERE = {name: entry for name, entry in all_engines().items() if name not in _ELSEWHERE}
INSTALLED = [name for name, entry in _EVERYWHERE.items() if not entry.requires or find_spec(entry.requires)]


def engine_param(name: str, *others: object, marks: Sequence[pytest.MarkDecorator] = ()) -> object:
    """A row of parameters; the first word of the first is an engine's name."""
    engine = name.split()[0]
    reason = f"the package {all_engines()[engine].requires!r} is not installed"
    return pytest.param(name, *others, marks=[pytest.mark.skipif(engine not in INSTALLED, reason=reason), *marks])


ENGINES = tuple(_EVERYWHERE)
ENGINE_PARAMS = [engine_param(name) for name in ENGINES]
