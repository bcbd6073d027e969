"""The log of requests does not grow for ever."""

from pathlib import Path

import pytest

from ownloop_server import serving
from ownloop_server.status import log


def test_old_lines_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOG_BYTES", 1000)
    with serving.request_log(tmp_path / "requests.log"):
        for number in range(200):
            log.info("POST /api/v1/asample 200 %d ms", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["requests.log", "requests.log.1", "requests.log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert "199 ms" in files[0].read_text()
