"""How an engine's thread receives the commands of its callers."""

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

from vllm.distributed.parallel_state import GroupCoordinator

from generator.engine_calls import EngineCalls
from generator.engine_commands import Close, Command, Generate
from generator.engine_status import ActivityClock
from rl.types import SamplingParams

_ALONE = cast(GroupCoordinator, SimpleNamespace(rank_in_group=0, broadcast_object=lambda commands: commands))
"""A group of one rank."""
_APART_S = 0.001


def test_requests_sent_together_share_their_first_step() -> None:
    """They are apart by less than a step takes. Other processes may delay the sender, so one attempt of many counts."""
    requests = [_request(str(i)) for i in range(4)]
    assert max(len(_received(requests)) for _ in range(20)) == len(requests)


def test_a_request_alone_is_not_held_up() -> None:
    def seconds() -> float:
        begin = time.monotonic()
        assert _received([_request("0")]) == [_request("0")]
        return time.monotonic() - begin

    assert min(seconds() for _ in range(20)) < 0.01


def test_a_stream_of_requests_without_an_end_cannot_hold_up_the_first() -> None:
    requests = [_request(str(i)) for i in range(200)]
    assert len(_received(requests)) < len(requests)


def test_no_other_command_waits_for_requests() -> None:
    """A pull begins at once."""
    close = Close("0")
    assert min(len(_received([close, _request("1")])) for _ in range(20)) == 1


def _request(request_id: str) -> Generate:
    return Generate(request_id, (1, 2), SamplingParams(max_tokens=4), num_samples=1, policy=None)


def _received(commands: list[Any]) -> list[Command]:
    """What an idle engine receives first if `commands` come one after the other."""
    calls = EngineCalls()

    def send() -> None:
        for command in commands:
            calls.put(command)
            time.sleep(_APART_S)

    sender = threading.Thread(target=send)
    sender.start()
    received = calls.receive(_ALONE, ActivityClock(), wait=True)
    sender.join()
    return received
