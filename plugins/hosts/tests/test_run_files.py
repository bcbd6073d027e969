"""Checkpoints of hosts that do not share a folder become whole on the controller's, or stay invisible."""

import asyncio
from pathlib import Path

import pytest

from ownloop_hosts import files
from plugins.hosts.tests.hosts_with_files import OtherHost, files_of
from trainer.engines.pytorch import checkpoint
from trainer.engines.pytorch.checkpoint import CheckpointInfo

PIECE = 1 << 22  # of a file that is transferred
SHARDS = {
    ".metadata": b"m" * 10,
    "__0_0.distcp": b"zero" * (PIECE // 2),
    "__1_0.distcp": b"one!" * (PIECE + 999),
    "empty": b"",
}
INFO = CheckpointInfo(kind="checkpoint", policy_version=3, model={"layers": 2}, num_ranks=2)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[OtherHost, OtherHost]:
    """Two hosts with files of their own."""
    return OtherHost("h1", tmp_path / "h1"), OtherHost("h2", tmp_path / "h2")


def write_shards(there: Path, hosts: tuple[OtherHost, OtherHost]) -> None:
    """What two ranks write: each its own shard, and the first one the rest."""
    first, second = (host.below(there) for host in hosts)
    for name, data in SHARDS.items():
        folder = files.hidden(second) if name.startswith("__1") else checkpoint_folder(first)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    checkpoint.complete(first, INFO)


def checkpoint_folder(path: Path) -> Path:
    """The hidden folder that the first rank makes once."""
    return files.hidden(path) if files.hidden(path).is_dir() else checkpoint.begin(path, 0)


async def save(path: Path, hosts: tuple[OtherHost, OtherHost]) -> None:
    """Writes and collects."""
    of_run = files_of(*hosts)
    there = await of_run.to_write(path)
    assert there != path
    write_shards(there, hosts)
    await of_run.collect(path, keep_last=1)


def test_shards_of_two_hosts_become_one_checkpoint(tmp_path: Path, hosts: tuple[OtherHost, OtherHost]) -> None:
    for step in (1, 2):
        path = tmp_path / "run" / f"step-{step}"
        asyncio.run(save(path, hosts))
        assert checkpoint.read_info(path) == INFO  # all files are there with their sizes
        assert {name: (path / name).read_bytes() for name in SHARDS} == SHARDS
    assert [each.name for each in path.parent.iterdir()] == ["step-2"]  # keep_last, and no remains
    for host in hosts:
        assert not host.below(path.parent).exists()
        assert host.most_in_flight <= 4


def test_a_host_that_is_lost_meanwhile_leaves_nothing_visible(
    tmp_path: Path, hosts: tuple[OtherHost, OtherHost]
) -> None:
    path = tmp_path / "run" / "step-1"
    hosts[1].fails_at = "read_piece"
    with pytest.raises(ConnectionError, match="h2 is lost"):
        asyncio.run(save(path, hosts))
    assert not path.exists()
    files.remove_unfinished()  # which the agents do, at the end
    assert [file for host in hosts for file in host.root.rglob("*") if file.is_file()] == []
    hosts[1].fails_at = ""
    asyncio.run(save(path, hosts))
    assert checkpoint.read_info(path) == INFO


def test_an_unwritable_host_is_refused_before_ranks_write(tmp_path: Path, hosts: tuple[OtherHost, OtherHost]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1").touch()
    with pytest.raises(ValueError, match="exists and is not an ownloop checkpoint"):
        asyncio.run(files_of(*hosts).to_write(tmp_path / "thesis"))
    hosts[1].below(tmp_path).parent.mkdir(parents=True)
    hosts[1].below(tmp_path).touch()
    with pytest.raises(ValueError, match=r"on host h2: .*run cannot be written: Not a directory.*\(--runs\)"):
        asyncio.run(files_of(*hosts).to_write(tmp_path / "run" / "step-1"))


def test_what_a_host_lacks_is_sent_to_it_and_removed(tmp_path: Path, hosts: tuple[OtherHost, OtherHost]) -> None:
    path = tmp_path / "run" / "step-1"
    asyncio.run(save(path, hosts))
    sharing = OtherHost("h1", Path("/"))

    async def load() -> None:
        async with files_of(sharing, hosts[1]).to_read(path) as paths:
            assert paths[0] == path
            there = hosts[1].below(paths[1])
            assert checkpoint.read_info(there) == INFO
            assert {name: (there / name).read_bytes() for name in SHARDS} == SHARDS
        assert not there.parent.exists()

    asyncio.run(load())
    assert "write_piece" not in sharing.asked


def test_a_shared_folder_is_tried_once_and_written_directly(tmp_path: Path) -> None:
    host = OtherHost("h1", Path("/"))
    of_run = files_of(host)
    for step in (1, 2):
        path = tmp_path / "runs" / f"step-{step}"
        assert asyncio.run(of_run.to_write(path)) == path
        asyncio.run(of_run.collect(path))
    assert host.asked == ["has"]
    assert list((tmp_path / "runs").iterdir()) == []
