"""Writes directories that are either complete or absent, and never overwrites a directory that ownloop did not write.

`torch.distributed.checkpoint` writes a checkpoint into a hidden sibling directory, which is renamed once all ranks are
done, so a killed save leaves nothing that loads. The file `ownloop.json` in it states the format, the policy version,
the model, the size of every file and the checksum of every shard. The engine decides what the state holds.

    every rank   begin -> .NAME.partial/ made by rank 0 -> write: each rank's shards -> complete: rank 0 adds
                 ownloop.json and renames the directory to NAME -> keep_newest: rank 0 deletes older ones
    background   the same, on copies in host memory, in a thread and a process group of their own, so that the
                 collectives of a save cannot mix with the next step's

`CheckpointSaver` makes these calls, one save after the other.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from rl.system.disk import read_json
from rl.system.ranks import all_gather, num_ranks, own_rank
from trainer.engines.pytorch.checkpoint_reader import CheckpointReader

_FILE = "ownloop.json"
_FORMAT = 1
Kind = Literal["checkpoint", "export"]
T = TypeVar("T")
State: TypeAlias = Mapping[str, "torch.Tensor | State"]
"""Nested dictionaries of tensors, sharded or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The contents of `ownloop.json`, except for the file sizes."""

    kind: Kind
    """A `checkpoint` can be resumed from; an `export` is a Hugging Face model directory."""
    policy_version: int
    model: Mapping[str, Any]
    """The model's description; a checkpoint of a model with another description is refused."""
    num_ranks: int
    """Number of ranks that wrote it, each with its own random state."""
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    """Shard -> the XXH3 hash of its contents, which shows damage; older checkpoints have none."""
    format: int = _FORMAT


def with_directory(path: Path, info: CheckpointInfo, size_bytes: int, write: Callable[[Path], None]) -> None:
    """Has `write` fill a hidden directory on every rank, and renames it to `path` once it is complete.

    Raises ValueError, before anything is written, if `path` exists and ownloop did not write it, or if it cannot be
    written, and OSError if there is no room for `size_bytes` or the disk fails. A collective.
    """
    partial = begin(path, size_bytes)
    with _naming(path):
        write(partial)
        complete(path, info)


def begin(path: Path, size_bytes: int, group: dist.ProcessGroup | None = None) -> Path:
    """Makes and returns the hidden directory that `complete` will rename to `path`. A collective of the group.

    Raises ValueError and OSError in the same cases as `with_directory`.
    """
    on_rank_0(lambda: _prepare(path, _partial(path), size_bytes), group)
    return _partial(path)


def complete(path: Path, info: CheckpointInfo, group: dist.ProcessGroup | None = None) -> None:
    """Renames the hidden directory to `path` after every rank has written to it. A collective of the group."""
    on_rank_0(lambda: _publish(path, _partial(path), info), group)


def complete_collected(path: Path) -> None:
    """Renames the hidden directory to `path` after the files of all hosts were brought to it.

    Its `ownloop.json`, which lists the files of one host only, is written anew.
    """
    file = _partial(path) / _FILE
    content = read_json(file)
    del content["file_sizes"]
    file.unlink()
    with _naming(path):
        complete(path, CheckpointInfo(**content))


def write(path: Path, tensors: dict[str, object], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Writes every rank's shards to the hidden directory that `begin` made. A collective of the group.

    Returns the checksums of all shards. If one rank cannot write, every rank raises CheckpointException.
    """
    dcp.save(tensors, checkpoint_id=_partial(path), process_group=group)
    # Read back at once, while the kernel still has them in memory.
    mine = {file.name: _checksum(file) for file in _partial(path).glob(f"__{own_rank()}_*.distcp")}
    return {name: checksum for of_rank in all_gather(mine, group) for name, checksum in of_rank.items()}


@contextlib.contextmanager
def _naming(path: Path) -> Generator[None]:
    """Turns an error of the disk into an OSError that names `path`, and deletes what was written of it."""
    try:
        yield
    except (CheckpointException, SafetensorError, OSError) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        rank, (cause, _) = min(failures.items(), default=(0, (error, None)))  # else rank 0 wrote, on behalf of all
        if isinstance(cause.__context__, OSError):  # torch's writer of archives raises another error in its place
            cause = cause.__context__
        free = shutil.disk_usage(path.parent).free
        shutil.rmtree(_partial(path), ignore_errors=True)
        raise OSError(
            f"{path} could not be written: rank {rank} raised {type(cause).__name__}: {cause}; "
            f"{free / 1e9:.2f} GB are free there"
        ) from cause


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def keep_newest(written: Path, count: int) -> None:
    """Deletes older checkpoints of ownloop in the directory of `written`, but for the `count` - 1 of highest versions.

    `written` stays, even if its version is lower, as it is for a policy that resumed from an older checkpoint.
    """
    found = [path for path in written.parent.iterdir() if not path.name.startswith(".") and _is_ours(path)]
    versions = {path: read_json(path / _FILE) for path in found}
    ours = [path for path in found if versions[path]["kind"] == "checkpoint"]
    for path in sorted(ours, key=lambda path: (path.name == written.name, versions[path]["policy_version"]))[:-count]:
        shutil.rmtree(path)


def read_info(path: Path, *, kind: Kind = "checkpoint") -> CheckpointInfo:
    """Reads and checks `ownloop.json`.

    Raises ValueError if the directory is missing, damaged, of another kind or not written by ownloop.
    """
    if not path.is_dir():
        raise ValueError(f"checkpoint path {path} does not exist or is not a directory")
    if not _is_ours(path):
        raise ValueError(f"{path} is not an ownloop checkpoint: it holds no {_FILE}")
    try:
        content = read_json(path / _FILE)
        sizes: dict[str, int] = content.pop("file_sizes")
        info = CheckpointInfo(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / _FILE} is damaged: {error!r}") from error
    if info.format != _FORMAT:
        raise ValueError(f"{path} has checkpoint format {info.format}; this version reads format {_FORMAT}")
    if info.kind != kind:
        raise ValueError(f"{path} is an ownloop {info.kind}; a {kind} is needed")
    for name, size in sizes.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(f"checkpoint {path} is damaged: {name} {found}; {size} bytes were written")
    return info


def load(path: Path, state: Mapping[str, object], model: Mapping[str, Any]) -> CheckpointInfo:
    """Fills the tensors of `state` in place. A collective.

    Raises ValueError, before anything is changed, if `read_info` does, if the checkpoint is of another model, if a
    shard is not as it was written, and if its `.metadata` names code to run; and for a shard that does or that cannot
    be read.
    """
    info = read_info(path)
    _check_model(path, info.model, model)
    _check_contents(path, info.checksums)
    reader = CheckpointReader(path)
    reader.read_metadata()  # here too, because DCP logs its error with a traceback before it reads the next file
    try:
        dcp.load(dict(state), storage_reader=reader)
    except CheckpointException as error:
        reasons = dict.fromkeys(
            str(failure) for failure, _ in error.failures.values()
        )  # ranks fail for the same reason
        raise ValueError(f"checkpoint {path} cannot be read: {'; '.join(reasons)}") from error
    return info


def _check_contents(path: Path, checksums: Mapping[str, str]) -> None:
    """Raises ValueError, on every rank, naming the shards that are not as they were written. A collective."""
    mine = sorted(checksums)[own_rank() :: num_ranks()]  # each file is read by one rank
    changed = [name for name in mine if _checksum(path / name) != checksums[name]]
    if names := [name for of_rank in all_gather(changed) for name in of_rank]:
        raise ValueError(f"checkpoint {path} is damaged: {', '.join(names)} changed since the checkpoint was written")


def _check_model(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises ValueError if a checkpoint of the model `theirs` does not fit the model `ours`.

    The description of an adapter has a `base`, with the name of the model under it and a hash of that model's weights.
    """
    their_base, our_base = theirs.get("base"), ours.get("base")
    if (their_base is None) != (our_base is None):
        what = ("a whole model", "an adapter") if their_base is None else ("an adapter", "a whole model")
        raise ValueError(f"{path} is a checkpoint of {what[0]}; {what[1]}'s is needed")
    if their_base is not None and our_base is not None and their_base["weights"] != our_base["weights"]:
        raise ValueError(
            f"{path} is a checkpoint of an adapter over another model: {their_base['name']!r} (weights "
            f"{their_base['weights']}) instead of {our_base['name']!r} (weights {our_base['weights']})"
        )
    differing = [key for key in ours if key != "base" and theirs.get(key) != ours[key]]
    if differing:
        details = ", ".join(f"{key} {theirs.get(key)!r} instead of {ours[key]!r}" for key in differing)
        raise ValueError(f"{path} is a checkpoint of another model: {details}")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _is_ours(path: Path) -> bool:
    return (path / _FILE).is_file()


def _prepare(path: Path, partial: Path, size_bytes: int) -> None:
    """Checks that `path` can be written, then makes an empty hidden directory."""
    if path.exists() and not _is_ours(path) and (path.is_file() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an ownloop checkpoint; it will not be overwritten")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    free = shutil.disk_usage(partial).free
    if free < size_bytes:
        partial.rmdir()
        raise OSError(f"{path} needs {size_bytes / 1e9:.2f} GB; {free / 1e9:.2f} GB are free there")


def _publish(path: Path, partial: Path, info: CheckpointInfo) -> None:
    """Writes `ownloop.json` and renames the hidden directory to `path`."""
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
    with (partial / _FILE).open("w") as file:
        json.dump({**asdict(info), "file_sizes": sizes}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    # A directory cannot be renamed onto one that holds files, so an older checkpoint is moved aside first.
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What rank 0's action returns, while every rank of the group waits. If it raises, all of them raise the same."""
    result: Any = None
    problem: Exception | None = None
    if own_rank() == 0:
        try:
            result = action()
        except Exception as error:
            problem = error
    result, problem = all_gather((result, problem), group)[0]
    if problem is not None:
        raise problem
    return result


class CheckpointSaver:
    """One per rank. Every rank makes the same calls in the same order; each is a collective."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_take_idle_time)
        # Half of a write's CPU time would go into checksums that torch does not read when it loads a file.
        torch.serialization.set_crc32_options(False)
        self._pending: Future[None] | None = None
        self._background_group: dist.ProcessGroup | None = None

    def save(
        self,
        path: Path,
        state: State,
        info: CheckpointInfo,
        *,
        size_bytes: int,
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> None:
        """Writes nested dictionaries of tensors, sharded or not. `path` appears only once everything is on disk.

        With `asynchronous`, returns as soon as copies are made, and `wait` raises the error of a failed save. With
        `keep_last`, only that many checkpoints, this one and the highest versions, stay in its directory.
        Waits for the previous save first. Raises ValueError, before anything is written, if `keep_last` is below 1, if
        `path` exists and ownloop did not write it, or if it cannot be written; and OSError, on every rank, if there is
        no room for `size_bytes` or one cannot write.
        """
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last is True or keep_last < 1):
            raise ValueError(f"keep_last is {keep_last!r}; it must be at least 1, and a whole number")
        self.wait()
        path = path.absolute()
        begin(path, size_bytes)

        def prune() -> None:
            if keep_last is not None:
                keep_newest(path, keep_last)

        def save(tensors: dict[str, object], group: dist.ProcessGroup | None) -> None:
            with _naming(path):
                complete(path, replace(info, checksums=write(path, tensors, group)), group)
            on_rank_0(prune, group)

        if not asynchronous:
            save(dict(state), None)
            return
        if dist.is_initialized() and self._background_group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._background_group = group
        self._pending = self._thread.submit(save, _copied(state), self._background_group)

    def wait(self) -> None:
        """Returns once no save is under way. Raises the error of the last one, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, as `wait` does, and frees the thread and the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._background_group is not None:
                dist.destroy_process_group(self._background_group)
                self._background_group = None


def _take_idle_time() -> None:
    """Gives the calling thread the lowest priority, so that a step has the processor first. Linux only."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _copied(state: State) -> dict[str, object]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else _copied(value)
        for key, value in state.items()
    }
