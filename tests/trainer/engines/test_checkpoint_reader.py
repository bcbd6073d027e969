"""A checkpoint that somebody else wrote runs no code when it is loaded."""

import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.checkpoint import CheckpointInfo
from trainer.engines.pytorch.checkpoint_reader import CheckpointReader

INFO = CheckpointInfo(kind="checkpoint", policy_version=3, model={"family": "llama"}, num_ranks=1)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self._file)!r}, 'w')",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16)}}

    def write(partial: Path) -> None:
        dcp.save(state, checkpoint_id=partial, no_dist=True)

    checkpoint.with_directory(tmp_path / "checkpoint", INFO, 0, write)
    return tmp_path / "checkpoint"


def load(path: Path) -> dict[str, Any]:
    state = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}}
    checkpoint.load(path, state, {"family": "llama"})
    return state["model"]


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Replaces a file of a checkpoint, and its size in ownloop.json, as one would who plants it."""
    (path / name).write_bytes(content)
    info = json.loads((path / "ownloop.json").read_text())
    info["file_sizes"][name] = len(content)
    (path / "ownloop.json").write_text(json.dumps(info))


def shard(path: Path) -> str:
    return next(path.glob("*.distcp")).name


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def test_own_checkpoints_load(path: Path) -> None:
    loaded = load(path)
    assert torch.equal(loaded["weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(loaded["bias"], torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_the_metadata_is_refused_and_not_run(path: Path, tmp_path: Path, protocol: int) -> None:
    planted = metadata(path)
    planted.planner_data = Payload(tmp_path / "was_here")
    replace_file(path, ".metadata", pickle.dumps(planted, protocol))
    with pytest.raises(ValueError, match=rf"{path}/\.metadata is refused: it would call .*\.(exec|_reconstructor)"):
        load(path)
    assert not (tmp_path / "was_here").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "was_here").exists(), "the payload itself does not work"


NAMED = {
    "torch.distributed.checkpoint.metadata": ("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath",),
    "torch": ("Size", "float32"),
    "torch.serialization": ("_get_layout",),
}


@pytest.mark.stranger("2.C12")
@pytest.mark.parametrize(
    "state", [{"planted": 1}, (None, {"planted": 1}), (None, {"__init__": 1}), ({"__eq__": 1}, None)]
)
@pytest.mark.parametrize("named", [f"{module}\n{name}" for module, names in NAMED.items() for name in names])
def test_a_refused_pickle_leaves_what_it_names_as_it_was(path: Path, named: str, state: object) -> None:
    module, name = named.split("\n")
    found = getattr(importlib.import_module(module), name)
    before = {attribute: getattr(found, attribute, None) for attribute in ("__init__", "__eq__", "__dict__")}
    before["__dict__"] = dict(before["__dict__"] or {})
    pushed = pickle.dumps(state, protocol=2)[2:-1]  # without its header and its end
    (path / ".metadata").write_bytes(b"\x80\x02c" + named.encode() + b"\n" + pushed + b"b.")
    with pytest.raises(ValueError, match=r"\.metadata (is refused|cannot be read)"):
        CheckpointReader(path).read_metadata()
    assert not hasattr(found, "planted")
    after = {attribute: getattr(found, attribute, None) for attribute in before}
    assert {**after, "__dict__": dict(after["__dict__"] or {})} == before


@pytest.mark.stranger("2.C12")
def test_a_refused_pickle_leaves_the_members_of_an_enumeration(path: Path) -> None:
    named, state = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n", pickle.dumps({"_value_": 7}, 2)
    (path / ".metadata").write_bytes(b"\x80\x02" + named + b"K\x01\x85R" + state[2:-1] + b"b.")
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        CheckpointReader(path).read_metadata()
    module = importlib.import_module("torch.distributed.checkpoint.metadata")
    assert [member.value for member in vars(module)["_MEM_FORMAT_ENCODING"]] == [0, 1, 2]


def test_code_in_a_shard_is_refused_and_not_run(path: Path, tmp_path: Path) -> None:
    name = shard(path)
    torch.save(Payload(tmp_path / "was_here"), path / name)
    content = (path / name).read_bytes()
    planted = metadata(path)
    for info in planted.storage_data.values():
        info.offset, info.length = 0, len(content)
    replace_file(path, name, content)
    replace_file(path, ".metadata", pickle.dumps(planted))
    with pytest.raises(ValueError, match=rf"{path}/{name} is refused: it would call exec;"):
        load(path)
    assert not (tmp_path / "was_here").exists()
    torch.load(path / name, weights_only=False)
    assert (tmp_path / "was_here").exists(), "the payload itself does not work"


def test_a_tensor_that_is_declared_an_object_is_refused(path: Path, tmp_path: Path) -> None:
    """DCP unpickles objects without restriction; so the metadata may not call a tensor one."""
    name = shard(path)
    torch.save(Payload(tmp_path / "was_here"), path / name)
    content = (path / name).read_bytes()
    planted = metadata(path)
    for key in planted.state_dict_metadata:
        planted.state_dict_metadata[key] = BytesStorageMetadata()
    replace_file(path, name, content)
    replace_file(path, ".metadata", pickle.dumps(planted))
    with pytest.raises(ValueError, match=r"metadata is refused: it would call .*\.BytesStorageMetadata"):
        load(path)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize("elsewhere", ["../other.distcp", "/etc/hostname", "sub/file.distcp", "..", "ownloop.json"])
def test_shards_outside_of_the_directory_are_refused(path: Path, elsewhere: str) -> None:
    planted = metadata(path)
    for info in planted.storage_data.values():
        info.relative_path = elsewhere
    replace_file(path, ".metadata", pickle.dumps(planted))
    with pytest.raises(ValueError, match=r"refers to '.*', which is no shard in"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}), "holds a dict instead of Metadata"),
        (b"no pickle", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_metadata_that_is_none_is_refused(path: Path, content: bytes, message: str) -> None:
    replace_file(path, ".metadata", content)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_shard_with_damaged_bytes_is_refused_by_name(path: Path) -> None:
    name = shard(path)
    replace_file(path, name, bytes(len((path / name).read_bytes())))
    with pytest.raises(ValueError, match=f"{name} (cannot be read|is refused)"):
        load(path)
