"""When a host counts as lost, and what is known of the processes on it. Agents, ports and clock are the test's."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from controller.processes.calls import Calls
from controller.processes.errors import HostLostError, MeshError, ProcessDiedError
from ownloop_hosts import remote_host
from ownloop_hosts.connections import Address
from ownloop_hosts.host_agent import RankStates
from ownloop_hosts.other_hosts import RemoteRanks
from ownloop_hosts.remote_host import Host, HostError
from plugins.hosts.tests.fake_hosts import fake_host, listener
from rl.deadlines import Deadlines
from tests.waiting import VirtualLoop, run_virtual

LOST_AFTER_S = 20.0


def watched(body: Callable[[Host, Callable[[], None]], Awaitable[None]]) -> None:
    """Runs `body` with a host that is watched, and a function that ends its worker."""

    async def main() -> None:
        server, address = listener()
        host = fake_host("n1", worker=address, lost_after_s=LOST_AFTER_S)
        host.watch()
        try:
            await body(host, server.close)
        finally:
            server.close()
            host.lose("the test is over")

    run_virtual(main())


async def lost(host: Host, within_s: float) -> float:
    """Seconds until the host is lost."""
    clock = asyncio.get_running_loop().time
    start = clock()
    while host.lost is None:
        assert clock() - start < within_s
        await asyncio.sleep(0.1)
    return clock() - start


def test_a_silent_host_is_lost_after_a_while_and_not_before() -> None:
    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        await asyncio.sleep(2)
        for _ in range(3):  # blips, which do not add up
            host.agent.answers.clear()
            await asyncio.sleep(LOST_AFTER_S / 2)
            host.agent.answers.set()
            await asyncio.sleep(2)
        assert host.lost is None
        host.agent.answers.clear()
        assert LOST_AFTER_S - 2 < await lost(host, 30.0) < LOST_AFTER_S + 2
        assert "it has not answered for" in (host.lost or "")

    watched(body)


def test_the_time_in_which_a_port_is_tried_is_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def cut_off(worker: Address, within_s: float) -> None:
            del worker
            loop.now += within_s

        monkeypatch.setattr(remote_host, "accepts", cut_off)
        host.agent.answers.clear()
        assert LOST_AFTER_S - 2 < await lost(host, 30.0) < LOST_AFTER_S + 4

    watched(body)


def test_a_worker_that_has_ended_is_noticed_at_once() -> None:
    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        host.lost_after_s = 60.0
        host.agent.answers.clear()
        end_worker()
        await lost(host, 30.0)
        assert "its worker has ended: nothing listens on tcp://127.0.0.1:" in (host.lost or "")

    watched(body)


def test_an_agent_that_has_ended_is_noticed_at_once() -> None:
    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        host.lost_after_s = 60.0
        host.agent.error = RuntimeError("it was killed")
        await lost(host, 30.0)
        assert "its agent has ended: it was killed" in (host.lost or "")

    watched(body)


def test_logs_are_copied_as_they_grow(tmp_path: Path) -> None:
    async def main() -> None:
        host, log, copy = fake_host("n1"), Path("/there/toy-0.log"), tmp_path / "toy-0.log"
        host.copies[log] = copy
        for text in (b"one\n", b"one\n", b"one\ntwo\n"):
            host.agent.logs[log] = text
            await host.refresh()
        assert copy.read_text() == "one\ntwo\n"
        host.agent.answers.clear()
        start = asyncio.get_running_loop().time()
        await host.refresh(within_s=2.0)
        assert asyncio.get_running_loop().time() - start == pytest.approx(2.0)

    run_virtual(main())


def test_a_log_that_cannot_be_copied_is_copied_later(tmp_path: Path) -> None:
    log, copy = Path("/there/toy-0.log"), tmp_path / "toy-0.log"

    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        host.agent.logs[log] = b"one\n"
        host.copies[log] = Path("/dev/full")
        await beats(host, 3)
        host.copies[log] = copy
        await beats(host, 3)
        host.agent.logs[log] += b"two\n"
        await asyncio.gather(beats(host, 3), host.refresh(), host.refresh())
        assert copy.read_text() == "one\ntwo\n"
        assert host.lost is None

    watched(body)


async def beats(host: Host, num: int) -> None:
    """Returns after so many more signs of life."""
    end = len(host.agent.calls) + num
    async with asyncio.timeout(30):
        while len(host.agent.calls) < end:
            await asyncio.sleep(0.01)


def test_a_host_that_cannot_be_watched_is_given_up() -> None:
    async def body(host: Host, end_worker: Callable[[], None]) -> None:
        host.lost_after_s = 60.0
        host.agent.on_beat = lambda _: "no beat"
        await lost(host, 30.0)
        assert "it cannot be watched any more: AttributeError: " in (host.lost or "")

    watched(body)


def test_stopping_a_host_that_does_not_answer_returns() -> None:
    async def stop() -> None:
        host = fake_host("n1")
        await host.stop()
        await host.stop()

    run_virtual(stop(), 10.0)


def test_a_worker_that_is_stopped_does_not_hold_up_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attached:
        """What Monarch returns for a worker that accepts connections and does nothing."""

        @property
        def initialized(self) -> Awaitable[None]:
            """Never answers."""
            return asyncio.sleep(60)

    monkeypatch.setattr(remote_host, "attach_to_workers", lambda **_: Attached())
    connecting = Host.connect(Address("tcp", "n1", 26600), "me", 20.0, {}, answers_within_s=3.0)
    with pytest.raises(HostError, match=r"^n1: its worker accepts connections and has not answered for 3 s; it may be"):
        run_virtual(connecting, 10.0)


def test_ranks_are_counted_host_by_host(tmp_path: Path) -> None:
    async def main() -> None:
        hosts = (fake_host("n1"), fake_host("n2"))
        logs = tuple(tmp_path / f"toy-{rank}.log" for rank in range(4))
        ranks = RemoteRanks("toy", hosts, (11, 12, 21, 22), logs)
        assert [ranks.name(rank) for rank in (1, 2)] == ["rank 1 (process 12 on n1)", "rank 2 (process 21 on n2)"]
        hosts[1].states = {"toy": RankStates(gone=(1,), stopped_s={0: 7.0}), "other": RankStates((0,), {})}
        ranks.look(2.0)
        assert (ranks.gone, ranks.stopped_s, ranks.lost_host) == ((3,), {2: 7.0}, None)
        assert await ranks.stacks([0, 3]) == (
            "--- Python stack of rank 0 ---\nrank 0 of toy\n--- Python stack of rank 3 ---\nrank 1 of toy"
        )
        hosts[0].lose("it has not answered for 20 s")
        ranks.look(2.0)
        assert ranks.gone == (0, 1, 3)
        assert ranks.lost_host == "host n1 is lost: it has not answered for 20 s"
        assert ranks.kill()
        assert ("kill", "toy") not in hosts[0].agent.calls  # a process id is never used here, nor a lost host asked
        assert ("kill", "toy") in hosts[1].agent.calls

    asyncio.run(main())


def test_a_call_to_a_lost_host_ends_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        hosts = (fake_host("n1"), fake_host("n2"))
        ranks = RemoteRanks("toy", hosts, (11, 21), tuple(tmp_path / f"toy-{rank}.log" for rank in range(2)))
        calls = Calls("toy", ranks, Deadlines())
        asyncio.get_running_loop().call_later(0.1, hosts[1].lose, "its worker has ended")
        with pytest.raises(
            HostLostError, match=r"toy: host n2 is lost: its worker has ended; rank 1 .*, in add"
        ) as caught:
            await calls.wait("add", {rank: asyncio.sleep(60) for rank in range(2)})
        assert (caught.value.mesh, caught.value.rank, caught.value.verb) == ("toy", 1, "add")
        with pytest.raises(HostLostError, match="host n2 is lost"):  # the mesh has ended
            await calls.wait("add", {0: asyncio.sleep(0)})

    run_virtual(main())


def test_a_death_that_monarch_tells_first_is_named_by_the_agent(tmp_path: Path) -> None:
    async def died() -> None:
        raise ProcessDiedError("an actor has failed")

    async def main() -> None:
        hosts = (fake_host("n1"), fake_host("n2"))
        ranks = RemoteRanks("toy", hosts, (11, 21), tuple(tmp_path / f"toy-{rank}.log" for rank in range(2)))
        hosts[1].agent.states = {"toy": RankStates(gone=(0,), stopped_s={})}
        with pytest.raises(MeshError, match=r"toy: rank 1 \(process 21 on n2\) died in die: an actor has failed"):
            await Calls("toy", ranks, Deadlines()).wait("die", {None: died()})

    asyncio.run(main())


@pytest.mark.stranger("2.E5")
@pytest.mark.parametrize("question", ["ask", "receive_model"])
def test_a_question_ends_with_the_loss_of_its_host(question: str) -> None:
    class Silent:
        class ask:  # noqa: N801, as the agent's endpoints
            call_one = staticmethod(lambda *_: asyncio.Event().wait())

        receive_model = ask

    async def main() -> None:
        host, clock = fake_host("n1"), asyncio.get_running_loop().time
        host.agent = Silent()
        asyncio.get_running_loop().call_later(2.0, host.lose, "its worker has ended")
        for limit in (2.1, 0.1):  # one that is asked while it is lost, and one that is lost
            start = clock()
            with pytest.raises(HostLostError, match="its worker has ended"):
                await (host.ask(len, ()) if question == "ask" else host.receive_model(cast(Any, None), 30.0))
            assert clock() - start < limit

    run_virtual(main())
