"""Sessions that send no heartbeat end, with their adapters and their places."""

import time
from pathlib import Path
from typing import Any

import pytest

from controller.gateway import gateway
from tests.controller.gateway.running_server import running_server
from tests.controller.gateway.sdk import new_client
from tests.controller.gateway.toy_model import ToyGenerator

pytestmark = pytest.mark.seconds


def test_one_that_fails_to_end_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: Any) -> None:
        raise ValueError("no replica has it")

    monkeypatch.setattr(gateway, "_SWEEP_S", 0.05)
    monkeypatch.setattr(ToyGenerator, "drop_policy", fail)
    with running_server(tmp_path) as server:
        for _ in range(2):
            new_client(server).save_weights_and_get_sampling_client().result()
            monkeypatch.setattr(gateway, "SESSION_S", 0.0)
            wait_for(lambda: not server.gateway.sessions and not server.gateway.training)
            monkeypatch.setattr(gateway, "SESSION_S", 1800.0)
    assert capfd.readouterr().err.count("ValueError: no replica has it") >= 2


def wait_for(condition: Any) -> None:
    """Returns once it is so."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
