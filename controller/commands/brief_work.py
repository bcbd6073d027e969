"""Work of a command that starts processes for a while: they end with it, whatever happens."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from controller.commands.command import FAILED
from controller.commands.output import CapturedOutput
from controller.commands.processes import StopSignals, adopt_orphans, end_descendants

T = TypeVar("T")


class CommandEndedError(Exception):
    """The work came to no result, and the user was told why; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        """The exit status."""
        super().__init__(status)
        self.status = status


def finish(work: Coroutine[Any, Any, T], output: CapturedOutput) -> T:
    """The result of the work. SIGINT, SIGTERM and SIGHUP end it.

    Raises `CommandEndedError` for a signal and for any error but a ValueError, which says what the user should change.
    """
    adopt_orphans()
    with StopSignals(lambda: None) as stop:
        try:
            return stop.run(work)
        except ValueError:
            raise
        except Exception as error:
            print(f"error: {type(error).__name__}: {error}", file=output.errors)
            raise CommandEndedError(FAILED) from error
        except BaseException as error:
            if stop.received is None:
                raise
            raise CommandEndedError(128 + stop.received) from error
        finally:
            end_descendants(grace_s=0.5)
