"""The transports of the core keep the contract."""

import pytest

from rl.weights.version import TRANSPORTS
from tests.rl.weights.host_sharing import HostSharing
from tests.rl.weights.transport_contract import TransportContract
from tests.stores import FakeStore


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every transport, without a GPU."""
    monkeypatch.setattr("rl.weights.gpu.CUDASharing", HostSharing)
    return request.param


@pytest.fixture
def store() -> FakeStore:
    """No transport of the core needs hosts."""
    return FakeStore()


class TestTransports(TransportContract):
    """All that the core has."""
