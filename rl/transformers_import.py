"""Imports transformers 5 in half the time, in every process of a run.

At its import transformers looks at each file of all packages that are installed, and reads the 1,600 files of its
models twice, once line by line in Python: half a second of a processor or more, on the way to the first answer.
`hasten_transformers` takes effect if it comes before the first import of transformers.

Remove when `transformers/utils/import_utils.py` neither calls `packages_distributions` at its import nor goes through
its models' files more than once.
"""

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_IMPORT_UTILS = "transformers.utils.import_utils"


def hasten_transformers() -> None:
    """Makes the first import of transformers faster. Does nothing after it, or when it is called again."""
    if _IMPORT_UTILS not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the one module of transformers whose functions are replaced."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del target
        if fullname != _IMPORT_UTILS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Hastening(spec.loader)
        return spec


class _Hastening(Loader):
    """Executes the module, and replaces those of its functions that take the time."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        distributions = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = _Distributions
        try:
            self._loader.exec_module(module)
        finally:
            importlib.metadata.packages_distributions = distributions
        for name, hastened in _HASTENED.items():
            if name in vars(module):
                setattr(module, name, hastened(getattr(module, name)))


class _Distributions(Mapping[str, list[str]]):
    """The distributions of each importable package, which are looked up when something asks for them."""

    @functools.cached_property
    def _found(self) -> Mapping[str, list[str]]:
        return importlib.metadata.packages_distributions()

    def __getitem__(self, package: str) -> list[str]:
        return self._found[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _own_name_first(candidates: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Names of distributions in which a package may be: its own name alone, if there is such a distribution."""

    def hastened(package: str) -> list[str]:
        for name in (package.replace("_", "-"), package):
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            return [name]
        return candidates(package)

    return hastened


def _from_last_all(exports: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The names in `__all__` of a file's text, of which only the last assignment counts."""

    def hastened(text: str) -> list[str]:
        start = f"\n{text}".rfind("\n__all__")
        return exports(text[start:]) if start >= 0 else []

    return hastened


def _once_a_directory(structure: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """What the files of a directory export. transformers keeps it by path, and names a directory in three ways."""

    def hastened(path: Any) -> dict[Any, Any]:
        directory = os.fspath(path)
        return structure(directory.rpartition(os.sep)[0] if directory.endswith(".py") else directory)

    return hastened


_HASTENED: Mapping[str, Callable[[Any], Callable[[Any], Any]]] = {
    "_candidate_distribution_names": _own_name_first,
    "fetch__all__": _from_last_all,
    "create_import_structure_from_path": _once_a_directory,
}
"""What replaces the functions of the module, made from the original of each, by name."""
