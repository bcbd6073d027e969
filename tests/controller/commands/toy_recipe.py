"""Any machine: a loop that trains nothing, for the tests of what is around a loop."""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field

from controller.runs import Console, Loop, RunFolder

STUBBORN = (
    "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A nested configuration that checks itself."""

    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise ValueError(f"Optimizer.learning_rate is {self.learning_rate}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    """A recipe of the loop below."""

    num_steps: int = 2
    mode: str = "finish"
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0

    def loop(self) -> Loop:
        return train


def recipe() -> ToyConfig:
    """The smallest."""
    return ToyConfig()


async def train(config: ToyConfig, folder: RunFolder, console: Console) -> None:
    """Starts a process that ignores every polite request, then does what `mode` says."""
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    print("noise from Python")
    subprocess.run(["echo", "noise from a child"], check=True)
    folder.log_metrics({"step": 1.0})
    (folder.path / "pid").write_text(str(child.pid))
    match config.mode:
        case "finish":
            console.step({"step": 2.0, "reward_mean": 0.5}, config.num_steps)
            console.done("That was all.")
        case "crash":
            raise RuntimeError("boom")
        case "sleep":
            await asyncio.sleep(600)
        case "block":
            time.sleep(600)
        case "no-cancel":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    console.warn("never")
        case _:
            raise ValueError(f"ToyConfig.mode is {config.mode!r}")
