"""`ownloop serve` of a tiny model, with a real trainer and a real generator, passes all checks of one user."""

import json
from pathlib import Path

import pytest

from ownloop_referee.command import CHECKS, CheckTinker
from plugins.server.tests.tiny_server import serving_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("in_process")]


def test_our_server_passes_all_checks(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    with serving_tiny_model(tmp_path, max_snapshots=8) as served:
        command = CheckTinker(url=served.url, base_model="tiny", model=served.model, context=64, json=results)
        status = command.run()
    found = {row["check"]: row["verdict"] for row in json.loads(results.read_text())["checks"]}
    assert found == {name: "not applicable" if name == "users" else "ok" for name in CHECKS}
    assert status == 0
