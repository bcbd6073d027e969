"""Reads the files of a `torch.distributed.checkpoint` without running code that an attacker put into them.

The file `.metadata` is a pickle, and so is the frame of every tensor in a shard. Unpickling calls any function that the
pickle names. Here a pickle may name only the classes that a checkpoint of tensors consists of; any other is refused.
"""

import pickle
import re
from collections import defaultdict
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
# BytesStorageMetadata is left out: DCP unpickles such values without any restriction.
_MADE = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
"""Classes whose instances a pickle makes without calling them."""
_CALLED = {
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


class CheckpointReader(FileSystemReader):
    """DCP's reader of a directory, for state that consists of tensors alone."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        super().__init__(path)
        self._directory = path

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The contents of `.metadata`.

        Raises ValueError, naming file and class, if it holds anything but the metadata of tensors in this directory.
        """
        del args, kwargs  # DCP asks for the file of one rank if there is none of all ranks; our checkpoints have one
        file = self._directory / _METADATA
        try:
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except _RefusedClassError as error:
            raise ValueError(f"{file} is refused: it would call {error}; nothing of it was run") from None
        except Exception as error:  # a damaged pickle raises errors of all kinds
            raise ValueError(f"{file} cannot be read: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{file} is refused: it holds a {type(metadata).__name__} instead of Metadata")
        self._check_files(file, metadata)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the tensors of a plan. Raises ValueError naming the file, and the class that it would have called."""
        items: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self.storage_data[item.storage_index].relative_path].append(item)
        for name, of_file in items.items():
            try:
                super().read_data(replace(plan, items=of_file), planner).wait()
            except pickle.UnpicklingError as error:
                found = re.search(r"GLOBAL (\S+)", str(error))
                reason = f"it would call {found[1]}; nothing of it was run" if found else str(error)
                raise ValueError(f"{self._directory / name} is refused: {reason}") from None
            except (RuntimeError, OSError) as error:
                raise ValueError(f"{self._directory / name} cannot be read: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_files(self, file: Path, metadata: Metadata) -> None:
        """Raises ValueError if the metadata refers to a file that is no shard of this directory."""
        for info in (metadata.storage_data or {}).values():
            name = str(getattr(info, "relative_path", None))
            if Path(name).name != name or Path(name).suffix != ".distcp":
                raise ValueError(f"{file} is refused: it refers to {name!r}, which is no shard in {self._directory}")


class _RefusedClassError(Exception):
    """The message is the class or function that a pickle names."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of tensors. Raises `_RefusedClassError` before anything else is imported or called."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """What makes an object of the class, if a checkpoint of tensors may consist of it.

        Never the class itself, since a pickle can set attributes of everything that it names.
        """
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not is_dtype and (module_name, global_name) not in _MADE | _CALLED:
            raise _RefusedClassError(f"{module_name}.{global_name}")
        found: Any = super().find_class(module_name, global_name)
        if (module_name, global_name) in _CALLED:
            return partial(_equal_to, found) if isinstance(found, type) and issubclass(found, Enum) else partial(found)
        return found if is_dtype else type(global_name, (), {"__new__": lambda _, *args: found.__new__(found, *args)})


def _equal_to(kind: type[Enum], value: object) -> object:
    """An object that is equal to the member of this value: there is one such member in the process."""
    return type(kind.__name__, (), {"__slots__": (), "__eq__": lambda _, other: other is kind(value)})()
