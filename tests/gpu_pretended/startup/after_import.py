"""Does something with a module as soon as a process has imported it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Waits for one module, which nothing has imported yet. Looking for its spec alone is no import."""

    def __init__(self, name: str, do: Callable[[Any], None]) -> None:
        """`do` gets the module."""
        self._name = name
        self._do = do
        self._looks = False
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called for every import."""
        del path, target
        if name != self._name or self._looks:
            return None
        self._looks = True
        spec = importlib.util.find_spec(name)
        self._looks = False
        assert spec is not None
        assert spec.loader is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self._do(module)

        loader.exec_module = exec_module
        return spec
