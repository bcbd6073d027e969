"""Any machine: a loop that only records, until the disk is full."""

import asyncio
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

from controller.runs import Console, Loop, RunFolder
from rl.types import Group
from tests.rl.fakes import completion, single_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """A recipe of the loop below."""

    num_steps: int = 100
    full_after: int = 3
    stopped: bool = False
    """Records one step on a slow disk, touches the file `recorded` and waits to be stopped."""
    seed: int = 0

    def loop(self) -> Loop:
        return train


def recipe() -> RecordingConfig:
    """The smallest."""
    return RecordingConfig()


async def train(config: RecordingConfig, folder: RunFolder, console: Console) -> None:
    """Records a group a step, as `Run` does."""
    rollout = single_turn((1, 2), completion("".join(map(chr, range(100, 30_000)))), reward=0.5)
    group = Group(problem_id="p", prompt="q", rollouts=(rollout,))
    if config.stopped:
        stopped = threading.Event()

        def slow_disk() -> None:
            stopped.wait(600)  # for the signal

        folder.in_background(slow_disk)
        folder.log_rollouts(1, [group])
        folder.log_metrics({"step": 1.0})
        Path("recorded").touch()
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()
    for step in range(1, config.num_steps + 1):
        if step == config.full_after + 1:
            await folder.sync()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        folder.log_metrics({"step": float(step)})
        folder.log_rollouts(step, [group])
        await folder.room()
