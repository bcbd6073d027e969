"""How an engine's thread receives the commands of its callers."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from vllm.distributed.parallel_state import GroupCoordinator

from generator.engine_calls import (
    ActivityClock,
    Backlog,
    Cancel,
    Close,
    Command,
    Drop,
    EngineCalls,
    Freeze,
    Generate,
    Queued,
    Update,
)
from rl.lora import Policy
from rl.types import PullMode, SamplingParams
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


def test_an_endless_stream_does_not_hold_up_the_first_request() -> None:
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


def _generate(policy: Policy) -> Generate:
    return Generate(f"generate {policy}", (1,), SamplingParams(max_tokens=1), 1, policy)


def _update(policy: str | None, *, version: int = 1, frozen: bool = False, mode: PullMode = "drain") -> Update:
    record: Any = SimpleNamespace(policy=policy, version=version)
    return Update(f"update {policy} {version}", record, frozen, mode, False)


def _carried_out(commands: Sequence[Queued], running: set[Policy]) -> list[str]:
    backlog = Backlog()
    for command in commands:
        backlog.append(command)
    done: list[str] = []
    while (command := backlog.next(lambda policy: bool(running) if policy is None else policy in running)) is not None:
        done.append(command.id)
    assert bool(backlog) == (len(done) < len(commands))
    return done


def test_a_draining_update_holds_back_its_own_policy_only() -> None:
    commands = [_update("a"), _generate("a"), _generate("b"), _generate(None), _update("b"), _generate(("a", 0))]
    assert _carried_out(commands, {"a"}) == ["generate b", "generate None", "update b 1", "generate ('a', 0)"]
    assert _carried_out(commands, {"a", "b"}) == ["generate b", "generate None", "generate ('a', 0)"]
    assert _carried_out(commands, {None}) == [command.id for command in commands]


def test_what_follows_a_waiting_command_of_a_policy_waits() -> None:
    frozen = _update("a", version=2, frozen=True)
    commands = [_update("a"), frozen, _generate(("a", 2)), Drop("drop", "a"), Freeze("freeze", "a", 1)]
    assert _carried_out(commands, {"a"}) == []
    assert _carried_out([frozen, _generate(("a", 2))], {"a"}) == [frozen.id, "generate ('a', 2)"]
    assert _carried_out([_update("a", mode="inflight"), _generate("a")], {"a"}) == ["update a 1", "generate a"]


def test_an_update_of_the_model_waits_for_all_and_holds_all() -> None:
    commands = [_generate("a"), _update(None), _generate("b"), Close("close")]
    assert _carried_out(commands, {"b"}) == ["generate a"]
    assert _carried_out([_update("a"), _update(None, mode="inflight")], {"a"}) == []
    assert _carried_out([_update(None, mode="inflight"), _generate("b")], {"a"}) == ["update None 1", "generate b"]


def test_a_cancelled_command_is_gone() -> None:
    backlog = Backlog()
    backlog.append(_generate("a"))
    assert not backlog.cancel(Cancel("another"))
    assert backlog.cancel(Cancel("generate a"))
    assert backlog.next(lambda policy: False) is None
