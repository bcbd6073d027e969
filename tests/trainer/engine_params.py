"""The engines of the table as parameters of tests; those whose package is not installed here are skipped.

`megatron_fsdp` needs CUDA and has tests of its own, `engines/test_megatron_fsdp.py`.
"""

from importlib.util import find_spec

import pytest

from trainer.engine_table import all_engines

_EVERYWHERE = {name: entry for name, entry in all_engines().items() if name != "megatron_fsdp"}
INSTALLED = [name for name, entry in _EVERYWHERE.items() if not entry.requires or find_spec(entry.requires)]


def engine_param(name: str) -> object:
    """A parameter whose first word is an engine's name."""
    engine = name.split()[0]
    reason = f"the package {all_engines()[engine].requires!r} is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(engine not in INSTALLED, reason=reason))


ENGINE_PARAMS = [engine_param(name) for name in _EVERYWHERE]
