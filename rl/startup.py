"""Lets a process start quickly.

Importing vLLM or torchtitan and building an engine make millions of objects, nearly all of which live as long as the
process. Python's garbage collector walks them again and again meanwhile, which takes a fifth of the time.
"""

import contextlib
import gc
import sys
from collections.abc import Generator
from importlib import import_module
from types import ModuleType


@contextlib.contextmanager
def without_garbage_collection() -> Generator[None]:
    """Within the block, garbage in cycles stays where it is."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_for_good(name: str) -> ModuleType:
    """Imports a module, and exempts all objects that exist then from garbage collection for good.

    If the module is there already, nothing is exempted: what exists by then may be short-lived.
    """
    if name in sys.modules:
        return sys.modules[name]
    with without_garbage_collection():
        module = import_module(name)
        gc.freeze()  # vLLM collects explicitly while it builds an engine
    return module
