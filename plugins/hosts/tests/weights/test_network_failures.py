"""Whoever dies, stops or cannot go on: a host has a whole version, and the next push reaches all again."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ownloop_hosts.weights.links import Link
from ownloop_hosts.weights.receiving_process import ReceivingProcess
from plugins.hosts.tests.weights.pushes import assert_read, publisher_to, push
from plugins.hosts.tests.weights.receiving_hosts import (
    RemoteCall,
    answer_calls,
    entry,
    host_entry,
    host_processes,
    read_at,
    register,
)
from rl.system.hardware import host_identity
from rl.weights.memory import WeightBuffer
from rl.weights.store import RECEIVERS_KEY
from rl.weights.version import UnknownVersionError, VersionRecord, WeightsError
from tests.stores import FakeStore
from tests.waiting import join
from trainer.engines.contract.plain_ranks import preloaded_forkserver

pytestmark = pytest.mark.seconds


def _before_sending(patch: pytest.MonkeyPatch, act: Callable[[], None], nth_message: int = 2) -> None:
    """Has the trainer do something once, before it sends its n-th message from now on."""
    original, counted = Link.send, [0]

    def send(link: Link, data: bytes | memoryview) -> None:
        counted[0] += isinstance(data, memoryview)
        if counted[0] == nth_message and isinstance(data, memoryview):
            act()
        original(link, data)

    patch.setattr(Link, "send", send)


@pytest.mark.slow
def test_hosts_that_die_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    with host_processes("h1", "h2", "h3") as hosts, host_processes("h2") as replacement:
        register(store, *(host.entry for host in hosts))
        publisher = publisher_to(store)
        push(publisher, 1)
        with monkeypatch.context() as patch:
            _before_sending(patch, hosts[1].process.kill)
            with pytest.warns(UserWarning, match=r"version 2 did not reach every generator host.*; h2: "):
                second = push(publisher, 2)
        for identity in ("h1", "h3"):
            assert_read(identity, second, monkeypatch)
        with pytest.raises(UnknownVersionError, match="version 2 is not on this host"):
            read_at("h2", second, monkeypatch)
        register(store, hosts[0].entry, replacement[0].entry, hosts[2].entry)
        third = push(publisher, 3)
        for identity in ("h1", "h2", "h3"):
            assert_read(identity, third, monkeypatch)


def test_a_push_waits_for_the_successor_of_the_only_process(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    with host_processes("h1") as (first,), host_processes("h1") as (second,):
        register(store, first.entry)
        publisher = publisher_to(store)
        push(publisher, 1)

        def die() -> None:
            first.process.kill()
            store.values[RECEIVERS_KEY] = (second.entry,)

        _before_sending(monkeypatch, die)
        monkeypatch.setattr("ownloop_hosts.weights.network.LOOK_S", 0.05)
        assert_read("h1", push(publisher, 2), monkeypatch)


def test_a_push_to_no_host_fails_and_the_next_one_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    with host_processes("h1", link_timeout_s=1.0) as (host,):
        register(store, host.entry)
        publisher = publisher_to(store)
        first = push(publisher, 1)
        pid = host.process.pid
        assert pid is not None
        with monkeypatch.context() as patch:
            _before_sending(patch, lambda: os.kill(pid, signal.SIGSTOP))
            patch.setattr("ownloop_hosts.weights.network.ALIVE_S", 0.5)
            patch.setattr("ownloop_hosts.weights.network.REPLACED_S", 0.5)
            with pytest.raises(WeightsError, match="version 2 reached no generator host; h1: "):
                push(publisher, 2)
        assert_read("h1", first, monkeypatch)
        assert [record.version for record in store.values["ownloop/weights"]] == [1]
        os.kill(pid, signal.SIGCONT)
        assert_read("h1", push(publisher, 3), monkeypatch)
        assert_read("h1", first, monkeypatch)


def test_between_pushes_a_host_may_stop_and_another_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    with host_processes("h1", "h2", "h3", link_timeout_s=1.0) as hosts:
        register(store, *(host.entry for host in hosts[:2]))
        publisher = publisher_to(store)
        push(publisher, 1)
        pid = hosts[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("ownloop_hosts.weights.network.ALIVE_S", 2.0)
            with pytest.warns(UserWarning, match=r"version 2 did not reach every generator host.*; h2: "):
                assert_read("h1", push(publisher, 2), monkeypatch)
        os.kill(pid, signal.SIGCONT)
        for version, count in ((3, 2), (4, 3)):  # the third joins when all of the others have the version before
            register(store, *(host.entry for host in hosts[:count]))
            record = push(publisher, version)
            for identity in ("h1", "h2", "h3")[:count]:
                assert_read(identity, record, monkeypatch)


def test_a_host_that_was_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ownloop_hosts.weights.network.LOOK_S", 0.05)
    store, whole = FakeStore(), ReceivingProcess(0.5)

    async def call(method: Callable[..., Any], *arguments: Any) -> Any:
        """The host is cut off when it is asked to begin. The controller notices, and takes it off the directory."""
        del arguments
        if method is ReceivingProcess.begin:
            store.values[RECEIVERS_KEY] = (host_entry(whole, "h2"),)
            await asyncio.Event().wait()

    register(store, entry("h1", 1, 0.5, call), host_entry(whole, "h2"))
    with pytest.warns(UserWarning, match="version 1 did not reach every generator host.*; h1: it is gone"):
        first = push(publisher_to(store), 1)
    assert_read("h2", first, monkeypatch)
    whole.close()


def _push_twice(pipe: Any, port: int) -> None:
    """A trainer that kills itself in the middle of its second push."""
    store = FakeStore()
    register(store, entry("h1", port, 5.0, RemoteCall(pipe)))
    publisher = publisher_to(store)
    pipe.send(push(publisher, 1))
    _before_sending(pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), signal.SIGKILL))
    push(publisher, 2)


def test_a_killed_trainer_leaves_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    preloaded_forkserver()
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    receiving = ReceivingProcess(5.0)
    records: list[Any] = []
    trainer = context.Process(target=_push_twice, args=(theirs, receiving.port), daemon=True)
    trainer.start()
    theirs.close()
    try:
        answer_calls(_Recording(pipe, records), receiving)  # returns when the trainer is dead
    finally:
        trainer.kill()
        join(trainer)
    first: VersionRecord = records[0]
    assert_read("h1", first, monkeypatch)
    store = FakeStore()
    register(store, host_entry(receiving, "h1"))
    second = push(publisher_to(store), 2)  # another trainer, with version numbers of its own
    assert_read("h1", second, monkeypatch)
    with pytest.raises(UnknownVersionError):
        read_at("h1", first, monkeypatch)
    receiving.close()


class _Recording:
    """A pipe that keeps the records which the trainer sends between its calls."""

    def __init__(self, pipe: Any, records: list[Any]) -> None:
        self._pipe = pipe
        self._records = records
        self.send = pipe.send

    def recv(self) -> Any:
        while isinstance(received := self._pipe.recv(), VersionRecord):
            self._records.append(received)
        return received


def test_a_reader_that_never_lets_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store, receiving = FakeStore(), ReceivingProcess(5.0)
    register(store, host_entry(receiving))
    publisher = publisher_to(store, reader_timeout_s=0.2)
    first, second = push(publisher, 1), push(publisher, 2)
    reading = WeightBuffer.open(first.location[host_identity()]).reading(first)
    with reading, pytest.raises(WeightsError, match=r"a reader has kept the weight buffer locked for 0\.2 s"):
        push(publisher, 3)
    assert_read(host_identity(), second, monkeypatch)
    assert_read(host_identity(), push(publisher, 4), monkeypatch)
