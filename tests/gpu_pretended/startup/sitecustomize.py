"""Python imports this at its start where the folder is in PYTHONPATH. It has torch compute on the pretended GPU.

Nothing happens until the process imports torch itself; tests.gpu_pretended.device then takes over.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Waits for the import of torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called for every import."""
        del path, target
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.path.insert(0, str(Path(__file__).parents[3]))
            from tests.gpu_pretended.device import install

            install(computes=os.environ["PRETENDED_GPU"] == "computed")

        loader.exec_module = exec_module
        return spec


if os.environ.get("PRETENDED_GPU"):
    sys.meta_path.insert(0, _AfterTorch())
