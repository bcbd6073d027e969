"""Garbage collection while a process starts."""

import gc
import sys
import weakref
from collections.abc import Generator
from pathlib import Path

import pytest

from rl.system.hardware import import_and_freeze, without_garbage_collection, without_walking_what_exists


@pytest.fixture(scope="module", autouse=True)
def collector_passes_over_imports() -> Generator[None]:
    """Here the collector is what is tested. Afterwards it passes over all that was imported again."""
    yield
    gc.collect()
    gc.freeze()


def test_the_collector_is_as_before_after_the_block() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="broken"), without_garbage_collection():
        raise ValueError("broken")
    assert gc.isenabled()


def test_only_the_first_import_exempts_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_module.py").write_text(
        "import gc\nenabled = gc.isenabled()\nvalues = [[] for _ in range(1000)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()
    try:
        module = import_and_freeze("heavy_module")
        assert not module.enabled
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        assert import_and_freeze("heavy_module") is module
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
        sys.modules.pop("heavy_module", None)


class _Node:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: _Node | None = None


def _cycle() -> "weakref.ref[_Node]":
    first, second = _Node(), _Node()
    first.other, second.other = second, first
    return weakref.ref(first)


@pytest.mark.seconds
def test_what_existed_before_the_block_is_collected_after_it() -> None:
    gc.collect()
    before = _cycle()
    with without_walking_what_exists():
        within = _cycle()
        gc.collect()
        assert within() is None
        assert before() is not None
    gc.collect()
    assert before() is None
