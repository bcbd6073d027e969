"""The port of a mesh's ranks is theirs from the moment in which it is chosen."""

import socket
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from controller.processes.rank_start import hold_port


@pytest.mark.parametrize("libuv", [True, False])
def test_a_held_port_is_torchs_and_nobody_elses(libuv: bool) -> None:
    port, given = hold_port(), set[int]()
    with ExitStack() as stack:
        for _ in range(500):
            given.add(stack.enter_context(socket.create_server(("", 0))).getsockname()[1])
    assert port not in given
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True, use_libuv=libuv)
    store.set("key", "value")
    assert store.get("key") == b"value"
