"""Keeps Python's garbage collector from walking what lives as long as the process.

Importing vLLM or torchtitan and building an engine make millions of objects, nearly all of which stay. The collector
walks them again and again meanwhile, which takes a fifth of the time. Later each of its full passes stops all threads
for most of a second; and since Python makes one only after the number of objects has grown by a quarter, garbage in
cycles waits for minutes.
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


@contextlib.contextmanager
def without_walking_what_exists() -> Generator[None]:
    """Within the block, garbage collection passes over the objects that existed before it."""
    gc.freeze()
    gc.collect()  # of nothing, so that Python compares with the few objects that are left when it next decides
    try:
        yield
    finally:
        gc.unfreeze()


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
