"""How an engine's thread receives the commands of its callers."""

import threading
from types import SimpleNamespace
from typing import cast

from vllm.distributed.parallel_state import GroupCoordinator

from generator.engine_calls import EngineCalls
from generator.engine_commands import Close, Command, Generate
from generator.engine_status import ActivityClock
from rl.types import SamplingParams
from tests.waiting import join

_ALONE = cast(GroupCoordinator, SimpleNamespace(rank_in_group=0, broadcast_object=lambda commands: commands))
"""A group of one rank."""
_NEVER_S = 600.0
"""Longer than a test waits."""


def test_requests_sent_together_share_their_first_step() -> None:
    calls, commands = EngineCalls(burst_s=_NEVER_S, max_burst_s=_NEVER_S), [*map(_request, "0123"), Close("4")]
    sender = threading.Thread(target=lambda: [calls.put(command) for command in commands], name="the sender")
    sender.start()
    assert _received(calls) == commands
    join(sender)


def test_a_request_alone_is_not_held_up() -> None:
    calls = EngineCalls(max_burst_s=_NEVER_S)
    calls.put(_request("0"))
    assert _received(calls) == [_request("0")]


def test_a_stream_of_requests_without_an_end_cannot_hold_up_the_first() -> None:
    calls, over = EngineCalls(burst_s=_NEVER_S), threading.Event()

    def send() -> None:
        while not over.wait(0.001):
            calls.put(_request("0"))

    sender = threading.Thread(target=send, name="the sender")
    sender.start()
    received = _received(calls)
    over.set()
    join(sender)
    assert received[0] == _request("0")


def test_no_other_command_waits_for_requests() -> None:
    """A pull begins at once."""
    calls = EngineCalls(burst_s=_NEVER_S, max_burst_s=_NEVER_S)
    calls.put(Close("0"))
    assert _received(calls) == [Close("0")]


def test_a_clock_knows_how_long_an_activity_takes_and_took() -> None:
    now = iter([10.0, 12.0, 12.0, 20.0, 20.0, 25.0, 26.0, 26.0])
    clock = ActivityClock(lambda: next(now))
    with clock.during("step"):  # from 10 to 12
        pass
    with clock.during("step"):  # from 20; what came before took 8
        status = clock.status(3, None)
    assert (status.activity, status.seconds, status.slowest_s, status.num_unfinished) == ("step", 5.0, 2.0, 3)


def _request(request_id: str) -> Generate:
    return Generate(request_id, (1, 2), SamplingParams(max_tokens=4), num_samples=1, policy=None)


def _received(calls: EngineCalls) -> list[Command]:
    """What an idle engine receives first."""
    return calls.receive(_ALONE, ActivityClock(), wait=True)
