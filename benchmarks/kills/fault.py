"""What may happen to a run, and which combinations of it are tried.

A fault is struck once, in the first call of its phase in step `STRIKE_STEP`. The process that strikes is told by an
environment variable; a resumed run does not have it.
"""

import itertools
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

Victim = Literal[
    "trainer", "trainer rank 1 of 2", "generator", "one of two replicas", "engine thread", "store", "controller"
]
Kind = Literal["SIGKILL", "SIGSTOP", "exception"]
Phase = Literal["generate", "forward_backward", "optim_step", "push", "pull", "save", "evaluate"]
LoopName = Literal["grpo", "grpo_async"]
STRIKE_STEP = 4
"""The step, of `NUM_STEPS`, in which a fault strikes; a checkpoint is due after it, and an evaluation."""
NUM_STEPS = 6
PROMPTS_PER_STEP = 4
LOG_NAMES: dict[Victim, str] = {
    "trainer": "trainer-0",
    "trainer rank 1 of 2": "trainer-1",
    "generator": "generator-0",
    "one of two replicas": "generator-1-0",
    "engine thread": "generator-0",
    "store": "store-0",
}
"""The log file of each victim, without its suffix: the name by which its process is found, and finds its order."""
_VARIABLE = "OWNLOOP_FAULT"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a run. A thread cannot get a signal: it ends, or sleeps for good, instead."""

    victim: Victim
    kind: Kind
    phase: Phase
    loop: LoopName
    lora: bool = False
    """Whether the run trains an adapter instead of the whole model."""

    def __str__(self) -> str:
        adapter = ", with an adapter" if self.lora else ""
        return f"{self.loop}{adapter}: {self.kind} of {self.victim} in {self.phase}"

    @property
    def possible(self) -> bool:
        """Whether it can be made to happen: TorchStore's own actors offer nothing that would raise."""
        return (self.victim, self.kind) != ("store", "exception")

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer."""
        return 2 if self.victim == "trainer rank 1 of 2" else 1

    @property
    def num_replicas(self) -> int:
        """Replicas of the generator."""
        return 2 if self.victim == "one of two replicas" else 1

    def environment(self, folder: Path) -> dict[str, str]:
        """What tells a run to strike. The files of the strike are in `folder`."""
        return {_VARIABLE: json.dumps({"folder": str(folder), **asdict(self)})}


def fault_from_environment() -> tuple[Fault, Path] | None:
    """The fault that this run is to strike, and the folder of its files."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    values = json.loads(text)
    folder = Path(values.pop("folder"))
    return Fault(**values), folder


def covering_faults(seed: int) -> list[Fault]:
    """Faults in which every two values of different factors that are possible together occur together.

    Greedy: of some random candidates that cover a pair not covered yet, takes the one that covers most.
    """
    chance = random.Random(seed)
    factors: list[Sequence[str]] = [get_args(Victim), get_args(Kind), get_args(Phase), get_args(LoopName)]
    every = [fault for values in itertools.product(*factors) if (fault := Fault(*values)).possible]  # type: ignore[arg-type]
    missing = {pair for fault in every for pair in _pairs(fault)}
    chosen: list[Fault] = []
    while missing:
        chance.shuffle(every)
        best = max(every, key=lambda fault: len(missing & _pairs(fault)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def few_faults() -> list[Fault]:
    """Six that between them have every loop, every kind, and every process of a run; and one with an adapter."""
    return [
        Fault("trainer", "SIGKILL", "save", "grpo"),
        Fault("trainer rank 1 of 2", "SIGSTOP", "forward_backward", "grpo_async"),
        Fault("one of two replicas", "SIGKILL", "generate", "grpo_async"),
        Fault("engine thread", "exception", "pull", "grpo"),
        Fault("store", "SIGKILL", "push", "grpo"),
        Fault("controller", "SIGKILL", "optim_step", "grpo_async"),
        Fault("trainer", "SIGKILL", "push", "grpo", lora=True),
    ]


def _pairs(fault: Fault) -> set[frozenset[tuple[str, str]]]:
    values: Iterable[tuple[str, str]] = (item for item in asdict(fault).items() if item[0] != "lora")
    return {frozenset(pair) for pair in itertools.combinations(values, 2)}
