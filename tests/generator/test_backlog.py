"""Commands are carried out in order, and wait only for what concerns their own policy."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from generator.backlog import Backlog, Queued
from generator.engine_commands import Cancel, Close, Drop, Freeze, Generate, Update
from rl.lora import Policy
from rl.types import PullMode, SamplingParams


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


def test_what_follows_a_waiting_command_of_the_same_policy_waits_too() -> None:
    frozen = _update("a", version=2, frozen=True)
    commands = [_update("a"), frozen, _generate(("a", 2)), Drop("drop", "a"), Freeze("freeze", "a", 1)]
    assert _carried_out(commands, {"a"}) == []
    assert _carried_out([frozen, _generate(("a", 2))], {"a"}) == [frozen.id, "generate ('a', 2)"]
    assert _carried_out([_update("a", mode="inflight"), _generate("a")], {"a"}) == ["update a 1", "generate a"]


def test_an_update_of_the_model_itself_waits_for_all_and_holds_all_back() -> None:
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
