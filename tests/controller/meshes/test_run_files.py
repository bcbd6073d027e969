"""Folders that are not shared are noticed before anything is written there."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from controller.meshes.place import Place, ThisHost
from controller.meshes.shared_folders import SharedFolders


class OtherHost:
    """A host whose files are below a folder of this one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.num_checks = 0

    async def check_there(self, check: Callable[..., object], token: Path) -> None:
        self.num_checks += 1
        try:
            check(self._root / token.relative_to("/"))
        except ValueError as error:
            raise ValueError(f"on host h2: {error}") from None


def _check(place: Any, path: Path) -> None:
    asyncio.run(SharedFolders(cast("Place", place)).check(path))


def test_a_folder_of_the_same_name_elsewhere_is_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step-00001"
    (tmp_path / "other" / path.parent.relative_to("/")).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"on host h2: .*runs is not the controller's folder .*\(--runs\)"):
        _check(OtherHost(tmp_path / "other"), path)
    assert list(path.parent.iterdir()) == []


def test_a_shared_folder_is_looked_at_once(tmp_path: Path) -> None:
    host = OtherHost(Path("/"))
    folders = SharedFolders(cast("Place", host))
    for step in (1, 2):
        asyncio.run(folders.check(tmp_path / "runs" / f"step-{step}"))
    assert host.num_checks == 1
    assert list((tmp_path / "runs").iterdir()) == []


def test_nothing_is_written_where_all_is_on_one_host(tmp_path: Path) -> None:
    for place in (None, ThisHost()):
        _check(place, tmp_path / "runs" / "step-00001")
    assert list(tmp_path.iterdir()) == []
