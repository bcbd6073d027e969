"""What all tests of weights share."""

import pytest


@pytest.fixture(autouse=True)
def hosts_that_pause_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up any answer; tests whose hosts do not answer set a limit of their own."""
    monkeypatch.setattr("ownloop_hosts.weights.network.ALIVE_S", 60.0)
