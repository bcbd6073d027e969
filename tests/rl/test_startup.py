"""Garbage collection while a process starts."""

import gc
import sys
from pathlib import Path

import pytest

from rl.startup import import_for_good, without_garbage_collection


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
