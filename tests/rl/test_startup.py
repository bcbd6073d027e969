"""Garbage collection while a process starts."""

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest

from rl.startup import import_for_good, import_patiently, without_garbage_collection, without_walking_what_exists


@pytest.fixture(scope="module", autouse=True)
def collector_passes_over_imports() -> None:
    """Here the collector is what is tested."""


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
        module = import_for_good("heavy_module")
        assert not module.enabled
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        assert import_for_good("heavy_module") is module
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


def test_a_patient_import_leaves_this_thread_its_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os, threading\nnice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    (tmp_path / "patient_module.py").write_text(source)
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(ValueError, match="broken"):
        import_patiently(["patient_module", "broken_module", "never_imported"])
    assert sys.modules.pop("patient_module").nice == max(before, 10)  # who is patient already stays so
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    import_patiently(["json"])
