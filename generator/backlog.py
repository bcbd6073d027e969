"""The order in which an engine carries out its commands: as they came, but no policy waits for another one's requests.

A command waits for an earlier one that concerns the same policy and waits itself. Only updates in "drain" mode, and
falling asleep, wait of their own accord, for requests that are running. Both concern every policy if the update is one
of the model itself.
"""

from collections.abc import Callable

from generator.engine_commands import Cancel, Close, Drop, Freeze, Generate, Rest, Stream, Update
from rl.lora import Policy

Queued = Generate | Stream | Update | Freeze | Drop | Rest | Close


class Backlog:
    """Commands that have not been carried out."""

    def __init__(self) -> None:
        """Starts empty."""
        self._commands: list[Queued] = []

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._commands)

    def append(self, command: Queued) -> None:
        """Adds a command."""
        self._commands.append(command)

    def cancel(self, cancel: Cancel) -> bool:
        """Drops the command of this id. Returns whether it was there."""
        kept = [command for command in self._commands if command.id != cancel.id]
        found = len(kept) < len(self._commands)
        self._commands = kept
        return found

    def next(self, has_requests: Callable[[Policy], bool]) -> Queued | None:
        """Takes out the next command that need not wait; None if all have to.

        `has_requests` says whether requests of a policy are running; for None, whether any are.
        """
        waiting: set[Policy] = set()
        for index, command in enumerate(self._commands):
            concerned = _concerned(command)
            behind = bool(waiting if concerned is None else waiting & concerned)
            if not behind and not _waits(command, has_requests):
                return self._commands.pop(index)
            if concerned is None:
                return None
            waiting |= concerned
        return None


def _waits(command: Queued, has_requests: Callable[[Policy], bool]) -> bool:
    match command:
        case Update(mode="drain", frozen=False):
            return has_requests(command.record.policy)
        case Rest(asleep=True):
            return has_requests(None)
        case _:
            return False


def _concerned(command: Queued) -> set[Policy] | None:
    """The policies that a command concerns; None if it concerns all of them."""
    match command:
        case Close() | Rest():
            return None
        case Generate() | Stream() | Drop():
            return {command.policy}
        case Freeze():
            return {command.name, (command.name, command.version)}
        case Update():
            policy = command.record.policy
            if policy is None:
                return None
            return {policy, (policy, command.record.version)} if command.frozen else {policy}
