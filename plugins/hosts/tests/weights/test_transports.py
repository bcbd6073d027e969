"""The transports between hosts keep the contract of the core."""

import pytest

from ownloop_hosts.weights.receiving_process import ReceivingProcess
from plugins.hosts.tests.weights.host_pairs import HostPairs
from plugins.hosts.tests.weights.receiving_hosts import host_entry, register
from rl.weights.version import Shard, WeightsError
from tests.rl.weights.transport_contract import TransportContract, make_sender, send, weights
from tests.stores import FakeStore


@pytest.fixture(params=["network", "nccl"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both, without a GPU."""
    monkeypatch.setattr("ownloop_hosts.weights.nccl.NCCLLink.maker", HostPairs())
    return request.param


@pytest.fixture
def store() -> FakeStore:
    """A store that knows this host as one that receives."""
    return receiving_store()


def receiving_store() -> FakeStore:
    """A new one."""
    register(store := FakeStore(), host_entry(ReceivingProcess()))
    return store


class TestTransports(TransportContract):
    """Both."""


def test_a_tensor_that_hosts_do_not_get_whole_is_named() -> None:
    a, b = weights(1).values()
    sender = make_sender("network", receiving_store())
    with pytest.raises(WeightsError, match="'b': the ranks' shards hold 8 bytes; the tensor has 20, each of which one"):
        send(sender, "network", 1, [Shard("a", a, a, ()), Shard("b", b, b[:2], (slice(0, 2),))])
