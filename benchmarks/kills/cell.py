"""One run that is hurt, from its start to the comparison with a run that was left alone."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from benchmarks.harness import REPOSITORY
from benchmarks.kills.fault import NUM_STEPS, PROMPTS_PER_STEP, Fault
from controller.commands.resume import recording_file
from controller.runs.folder import read_metrics
from controller.runs.metric_rows import by_step, metric_differences
from controller.runs.recording import read_recording
from rl.tiny_tasks import EvenWords

ERROR_WITHIN_S = 30.0
"""Seconds from a fault to the end of a run that does not go on."""
RUN_LIMIT_S = 240.0
"""Seconds after which a run hangs."""
_CONTINUE_AFTER_S = 12.0  # when a controller that was stopped is told to go on
_ENDS_WITHIN_S = 60.0  # on a busy machine; the time that processes may take to notice that their controller is gone
_MARK = "KILLS_CELL"
_NUM_GROUPS = NUM_STEPS * PROMPTS_PER_STEP
# A request that arrives a moment later is computed in another batch, whose float32 sums are rounded differently.
_ROUNDING = 1e-5


@dataclass(slots=True)
class Outcome:
    """What a run made of its fault."""

    name: str
    what: str = ""
    """In words: "goes on", "ends with an error, resumes", or what went wrong."""
    seconds: float = 0.0
    """From the fault to the end of the process that was hurt."""
    hung: bool = False
    """Whether the fault never struck, or the run did not end, or not in time, or without an error that says why."""
    unequal: bool = False
    """Whether the metrics, or the groups that were trained on, differ from those of a run without a fault."""
    processes_left: int = 0
    notes: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        """One line, and one for each thing that was wrong."""
        left = [f"{self.processes_left} processes left"] * (self.processes_left > 0)
        return "\n         ".join([f"{self.name:<62} {self.what} ({self.seconds:.0f} s)", *self.notes, *left])

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.hung or self.unequal or self.processes_left)


class Cell:
    """Runs in a folder of their own, with the processes that belong to them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        fault: Fault,
        prefix: Sequence[str] = (),
        root: Path = Path("/"),
        deadline_s: float = 10.0,
    ) -> None:
        """The run is that of the fault's loop and layout. `prefix` begins every command, which sees `root` as /.

        A process that does not answer for `deadline_s` is killed: a thread that sleeps is found so.
        """
        self.folder = folder
        self._root = root
        self._id = uuid.uuid4().hex
        self._prefix = prefix
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            _MARK: self._id,
            "KILLS_MODEL": str(model),
            "KILLS_LOOP": fault.loop,
            "KILLS_RANKS": str(fault.num_ranks),
            "KILLS_REPLICAS": str(fault.num_replicas),
            "KILLS_LORA": str(int(fault.lora)),
            "KILLS_DEADLINE": str(deadline_s),
        }
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> Path:
        """The run's folder, as this process sees it."""
        return self._root / (self.folder / "runs" / "run").relative_to("/")

    def start(self, *, extra: dict[str, str] | None = None, options: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        """Starts the run, or goes on with it if there is one. Its output goes to a file."""
        recipe = str(REPOSITORY / "benchmarks" / "kills" / "recipe.py")
        arguments = ["--resume", "run"] if (self.run / "config.json").is_file() else [recipe, "--name", "run"]
        command = [*self._prefix, sys.executable, "-m", "controller.commands.cli", "run", *arguments, *options]
        environment = {**self._environment, **(extra or {})}
        stream: IO[bytes] = (self.folder / "output.txt").open("ab")
        with stream:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def output(self) -> str:
        """What the runs have printed so far."""
        file = self.folder / "output.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def processes(self) -> list[int]:
        """The live processes of this cell."""
        mark, found = f"{_MARK}={self._id}".encode(), list[int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def end(self) -> int:
        """Waits until every process has ended, kills the others, and returns their number."""
        wait_until(lambda: not self.processes(), _ENDS_WITHIN_S)
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def process_of(log: Path) -> int | None:
    """The process whose output goes to a log, if it runs; not one of its children, whose numbers may be lower."""
    parents: dict[int, int] = {}
    for pid in psutil.pids():  # `process_iter` remembers processes, and hides one that has the number of one before it
        with suppress(OSError, psutil.Error):
            if Path(f"/proc/{pid}/fd/1").readlink() == log:
                parents[pid] = psutil.Process(pid).ppid()
    return next((pid for pid, parent in parents.items() if parent not in parents), None)


def wait_until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.2) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def left_alone(cell: Cell, options: Sequence[str] = ()) -> Path:
    """The folder of a run without a fault. Raises RuntimeError if it fails."""
    if cell.start(options=options).wait(RUN_LIMIT_S) != 0:
        raise RuntimeError(f"a run without a fault failed:\n{cell.output()}")
    return cell.run


def hurt(cell: Cell, fault: Fault, whole: Path | None) -> Outcome:
    """Strikes the fault in a run, resumes it if it does not go on by itself, and compares it with a `whole` one.

    `grpo_async` is not repeatable, so its runs need none.
    """
    outcome, struck = Outcome(str(fault)), cell.folder / "struck"
    process = cell.start(extra=fault.environment(cell.folder))
    wait_until(lambda: struck.exists() or process.poll() is not None, RUN_LIMIT_S, every_s=0.02)
    if not struck.exists():
        outcome.hung, outcome.what = True, "the fault never struck"
        outcome.processes_left = cell.end()
        return outcome
    begin = time.monotonic()
    if (fault.victim, fault.kind) == ("controller", "SIGSTOP"):
        time.sleep(_CONTINUE_AFTER_S)
        process.send_signal(signal.SIGCONT)
    return finish(cell, outcome, process, begin, whole)


def finish(
    cell: Cell,
    outcome: Outcome,
    process: "subprocess.Popen[bytes]",
    begin: float,
    whole: Path | None,
    *,
    before_resume: Callable[[], None] | None = None,
    keep: bool = False,
    error_within_s: float = ERROR_WITHIN_S,
) -> Outcome:
    """Waits for the end of a run that was hurt at `begin`, resumes it if it is not done, and judges both.

    Removes the cell's folder if nothing was wrong, unless `keep` is set.
    """
    ended = wait_until(lambda: process.poll() is not None, RUN_LIMIT_S)
    outcome.seconds = time.monotonic() - begin
    if ended:
        settle(cell, outcome, process.returncode, before_resume, error_within_s)
    else:
        outcome.hung, outcome.what = True, "hangs"
    outcome.processes_left += cell.end()
    if not outcome.hung:
        compare(outcome, cell.run, whole)
    if outcome.ok and not keep:
        shutil.rmtree(cell.folder, ignore_errors=True)
    return outcome


def settle(
    cell: Cell,
    outcome: Outcome,
    status: int,
    before_resume: Callable[[], None] | None,
    error_within_s: float = ERROR_WITHIN_S,
) -> None:
    """Judges how the hurt process ended, and resumes the run if it did not come to its end."""
    if status == 0:
        outcome.what = "goes on"
        return
    said = [line for line in cell.output().splitlines() if line.startswith("error: ")]
    if status != -signal.SIGKILL and not said:
        outcome.hung, outcome.what = True, f"ends with status {status} and no error"
        return
    if outcome.seconds > error_within_s:
        outcome.hung, outcome.what = True, f"ends after {outcome.seconds:.0f} s: {said[-1] if said else 'killed'}"
        return
    error = said[-1].split(":")[1].strip() if said else "killed"
    outcome.processes_left = cell.end()
    if before_resume is not None:
        before_resume()
    resumed = cell.start()
    ended = wait_until(lambda: resumed.poll() is not None, RUN_LIMIT_S)
    if not ended or resumed.returncode != 0:
        outcome.hung, outcome.what = True, f"ends ({error}) and does not resume"
        return
    outcome.what = f"ends ({error}), resumes"


def compare(outcome: Outcome, run: Path, whole: Path | None) -> None:
    """Notes what is wrong: missing steps, groups that are trained on never or twice, metrics that a `whole` run has."""
    ours = by_step(read_metrics(run / "metrics.jsonl"))
    if whole is not None:
        outcome.notes += [
            f"{each.name} of step {each.step} is {each.values[0]!r}; without the fault {each.values[1]!r}"
            for each in metric_differences(ours, by_step(read_metrics(whole / "metrics.jsonl")))
            if not math.isclose(*each.values, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        ][:3]
    if sorted(ours) != list(range(NUM_STEPS + 1)):
        outcome.notes.append(f"steps {sorted(ours)} instead of 0 to {NUM_STEPS}")
    trained = [group.problem_id for groups in read_recording(recording_file(run)).values() for group in groups]
    if sorted(trained) != sorted(problem.id for problem in EvenWords().train_problems(0, 0, _NUM_GROUPS)):
        outcome.notes.append("the groups trained on are not those of a run without the fault")
    if not (run / "model" / "config.json").is_file():
        outcome.notes.append("no exported model")
    outcome.unequal = bool(outcome.notes)
