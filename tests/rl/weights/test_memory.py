"""Readers see whole versions only, whichever process dies, and nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.system.hardware import available_memory_bytes, host_identity
from rl.weights.memory import BufferLocation, WeightBuffer, held_version
from rl.weights.store import INDEX_KEY, find_record
from rl.weights.version import (
    Manifest,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    buffer_size,
    build_manifest,
)
from tests.stores import FakeStore
from tests.waiting import LIMIT_S, has_ended, wait_for_line, wait_until

MANIFEST: Manifest = build_manifest([("a", (512, 300), torch.float32), ("b", (7,), torch.bfloat16)])


def _record(buffer: WeightBuffer, version: int, push_index: int | None = None) -> VersionRecord:
    return VersionRecord(
        version=version,
        push_index=version if push_index is None else push_index,
        manifest=MANIFEST,
        dtype=torch.float32,
        transport="shared_memory",
        host=host_identity(),
        location=buffer.location,
    )


def _write(buffer: WeightBuffer, version: int) -> VersionRecord:
    record = _record(buffer, version)
    buffer.begin_write(timeout_s=60)
    for spec in MANIFEST:
        buffer.tensor(spec).fill_(version % 128)
    buffer.seal(record)
    return record


def _child(source: str, *arguments: object) -> "subprocess.Popen[str]":
    """A process that runs `source` with this module's names, its arguments in `arguments`."""
    module = "tests.rl.weights.test_memory"
    prelude = f"import sys, time\nfrom {module} import *\nfrom {module} import _record, _write\n"
    prelude += "arguments = [int(a) for a in sys.argv[1:]]\n"
    command = [sys.executable, "-c", prelude + source, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )


def _line(process: "subprocess.Popen[str]") -> str:
    return wait_for_line(process.stdout, "the child")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate(timeout=LIMIT_S)


def test_manifest_lays_tensors_out_without_overlap() -> None:
    end = 0
    for spec in MANIFEST:
        assert spec.offset >= end
        assert spec.offset % 64 == 0
        end = spec.offset + spec.nbytes
    assert buffer_size(MANIFEST) == -(-end // 64) * 64
    with pytest.raises(ValueError, match="the tensor 'a' occurs twice"):
        build_manifest([("a", (1,), torch.float32), ("a", (1,), torch.float32)])


def test_the_newest_push_of_a_version_is_found() -> None:
    store = FakeStore()
    records = [
        replace(_record(WeightBuffer.create(4096), *each), transport="torchstore") for each in ((4, 2), (3, 0), (4, 1))
    ]
    store.values[INDEX_KEY] = tuple(records)
    assert asyncio.run(find_record(store, 4)).push_index == 2
    with pytest.raises(UnknownVersionError, match="version 5 cannot be pulled; versions that can: 3, 4"):
        asyncio.run(find_record(store, 5))


def test_a_reader_sees_what_was_written_and_only_that_version() -> None:
    buffer = WeightBuffer.create(buffer_size(MANIFEST))
    assert held_version(_record(buffer, 0), buffer.location) is None
    first = _write(buffer, 1)
    assert held_version(_record(buffer, 0), buffer.location) == first
    reader = WeightBuffer.open(buffer.location)
    with reader.reading(first):
        assert held_version(first, buffer.location) == first
        assert all((reader.tensor(spec) == 1).all() for spec in MANIFEST)
        with pytest.raises(WeightsError, match=r"kept the weight buffer locked for 0\.05 s"):
            buffer.begin_write(timeout_s=0.05)
    second = _write(buffer, 2)
    with pytest.raises(UnknownVersionError, match="its buffer holds version 2 by now"), reader.reading(first):
        pass
    other = replace(second, frozen_id=bytes(range(16)))
    with pytest.raises(UnknownVersionError, match="no longer kept"), reader.reading(other):
        pass
    buffer.begin_write(timeout_s=1)
    assert held_version(first, buffer.location) is None
    with pytest.raises(UnknownVersionError, match="it or a newer one is being written"), reader.reading(second):
        pass
    buffer.abandon_write()
    with pytest.raises(UnknownVersionError, match="its buffer holds an unfinished push"), reader.reading(second):
        pass


def test_the_same_version_published_twice_is_not_confused() -> None:
    buffer = WeightBuffer.create(buffer_size(MANIFEST))
    _write(buffer, 1)
    with pytest.raises(UnknownVersionError, match="holds version 1 by now"), buffer.reading(_record(buffer, 1, 9)):
        pass


def test_buffers_larger_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the host's own figure, which other processes change by gigabytes while a test runs.
    available = buffer_size(MANIFEST) * 3 // 2  # one buffer would fit, the two that live do not
    monkeypatch.setattr("rl.weights.memory.available_memory_bytes", lambda: available)
    need = f"weights need {2 * buffer_size(MANIFEST) / 1e6:.1f} MB of shared memory and {available / 1e6:.1f} MB are"
    with pytest.raises(WeightsError, match=rf"{need} available; weight_transport='torchstore' needs none"):
        WeightBuffer.create_for(MANIFEST)
    available = 2 * buffer_size(MANIFEST)
    assert len(WeightBuffer.create_for(MANIFEST)) == 2


def test_a_host_has_some_memory() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


READ = """
buffer = WeightBuffer.open(BufferLocation(*arguments[:3]))
print("ready", flush=True)
whole = refused = 0
end = time.monotonic() + 0.5
while time.monotonic() < end or whole <= 20:
    version = int.from_bytes(buffer._memory[16:24], "little", signed=True)
    try:
        with buffer.reading(_record(buffer, version)):
            values = {float(v) for spec in MANIFEST for v in buffer.tensor(spec).unique()}
            assert values == {float(version % 128)}, (version, values)
        whole += 1
    except UnknownVersionError:
        refused += 1
print(whole, refused, flush=True)
"""


@pytest.mark.seconds
def test_readers_and_a_writer_that_hammer_never_tear() -> None:
    buffer = WeightBuffer.create(buffer_size(MANIFEST))
    _write(buffer, 1)
    readers = [_child(READ, *buffer.location[:3]) for _ in range(2)]
    try:
        assert [_line(reader) for reader in readers] == ["ready", "ready"]
        version = 1
        while any(reader.poll() is None for reader in readers):
            version += 1
            _write(buffer, version)
        counts = [[int(n) for n in _line(reader).split()] for reader in readers]
        assert [reader.wait(LIMIT_S) for reader in readers] == [0, 0]
        assert all(whole > 20 for whole, _ in counts)
        assert version > 20
    finally:
        for reader in readers:
            _end(reader)


WRITE_HALF = """
buffer = WeightBuffer.create(buffer_size(MANIFEST))
record = _write(buffer, 1)
print(*buffer.location[:3], flush=True)
input()  # until the test has read version 1
buffer.begin_write(timeout_s=60)
buffer.tensor(MANIFEST[0])[:5].fill_(99)
print("half", flush=True)
time.sleep(3600)
"""


@pytest.mark.seconds
def test_a_killed_writers_buffer_is_refused_and_then_freed() -> None:
    writer = _child(WRITE_HALF)
    try:
        pid, fd, inode = map(int, _line(writer).split())
        location = BufferLocation(pid, fd, inode)
        reader = WeightBuffer.open(location)
        with reader.reading(_record(reader, 1)):
            assert (reader.tensor(MANIFEST[0]) == 1).all()
        assert writer.stdin is not None
        print(file=writer.stdin, flush=True)
        assert _line(writer) == "half"
        writer.send_signal(signal.SIGKILL)
        wait_until(lambda: has_ended(pid), "the writer to end")
        user = os.geteuid()
        with contextlib.suppress(OSError):  # where there are other users
            os.seteuid(user or 65534)
        try:  # nobody has waited for it yet, and what it had is shown to the superuser alone
            with pytest.raises(WeightsError, match=f"process {pid}, which is gone"):
                WeightBuffer.open(location)
        finally:
            os.seteuid(user)
        writer.wait(LIMIT_S)
        with pytest.raises(UnknownVersionError, match="unfinished push"), reader.reading(_record(reader, 1)):
            pass
        reader.close()
        with pytest.raises(WeightsError, match=f"process {location[0]}, which is gone"):
            WeightBuffer.open(location)
        with pytest.raises(WeightsError, match=f"process {location[0]}, which is gone"):
            held_version(_record(reader, 1), location)
    finally:
        _end(writer)


HOLD = """
buffer = WeightBuffer.open(BufferLocation(*arguments[:3]))
with buffer.reading(_record(buffer, 1)):
    print("reading", flush=True)
    time.sleep(3600)
"""


@pytest.mark.seconds
def test_a_killed_reader_does_not_block_the_writer() -> None:
    buffer = WeightBuffer.create(buffer_size(MANIFEST))
    _write(buffer, 1)
    reader = _child(HOLD, *buffer.location[:3])
    try:
        assert _line(reader) == "reading"
        with pytest.raises(WeightsError, match="is it stopped"):
            buffer.begin_write(timeout_s=0.1)
        reader.send_signal(signal.SIGKILL)
        _write(buffer, 2)
    finally:
        _end(reader)
