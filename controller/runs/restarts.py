"""Restarts: a run whose trainer, store or last generator failed continues after its newest checkpoint, by itself.

The loop has ended by then, and with it every process that it started. It begins again in the same controller, exactly
as `ownloop run --resume` would begin it, so the metrics equal a run's without the failure. Where the trainers are
whole, the last finished step was saved first (see `Steps` in training_run.py). A run that has no checkpoint yet begins
at step 1. Generators are replaced one by one while the loop continues (controller/handles/generator_router.py). They
end it only if they cannot be.
"""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from controller.launching.hosts import kept, run_hosts
from controller.processes.errors import MeshError
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import Loop, options_of


async def run_with_restarts(loop: Loop, config: object, folder: RunFolder, console: Console) -> None:
    """Runs a loop to its end, and begins it again when a process fails, `max_restarts` times at most.

    A configuration without that field is not restarted. Raises `MeshError` if the loop may not be restarted (again);
    every other error of the loop is raised at once, since it would happen again. Hosts that were allocated for the run
    stay its own until it ends.
    """
    run_hosts.set(hosts := options_of(config).hosts)
    limit = RestartLimit(config) if options_of(config).max_restarts else None
    async with kept(hosts, console.phase):
        await _until_the_end(limit, loop, config, folder, console)


async def _until_the_end(
    limit: "RestartLimit | None", loop: Loop, config: object, folder: RunFolder, console: Console
) -> None:
    while True:
        try:
            return await loop(config, folder, console)
        except MeshError as error:
            if limit is None:
                raise
            if not limit.allows_another():
                console.warn(f"the run is not restarted again: {limit}")
                raise
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()  # into the log: the console has one line
            console.warn(f"{error.mesh} failed: {error.reason}")
            console.phase(f"restarting after the newest checkpoint ({limit})")
        finally:
            folder.loop_end.has_come()
        folder.begin_again()


class RestartLimit:
    """Counts the restarts of a run, of which a time window may hold only so many."""

    def __init__(self, config: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`config` has the fields `max_restarts` and `restart_window_minutes`; `clock` returns seconds."""
        self._at_most: int = config.max_restarts
        self._window_minutes: float = config.restart_window_minutes
        self._clock = clock
        self._restarts: deque[float] = deque()

    def __str__(self) -> str:
        """How many of the allowed restarts were used up."""
        return f"{len(self._restarts)} of at most {self._at_most} restarts in {self._window_minutes:g} minutes"

    def allows_another(self) -> bool:
        """Whether the run may be restarted now; if so, the restart is counted."""
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - 60 * self._window_minutes:
            self._restarts.popleft()
        if len(self._restarts) >= self._at_most:
            return False
        self._restarts.append(now)
        return True
