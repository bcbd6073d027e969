"""Runs over three simulated hosts, one of which is hurt from outside while a call to it is in flight.

The trainer has a rank on h1 and one on h2, the generator is on h3, and the controller on a host of its own.
"""

import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.kills.cell import ERROR_WITHIN_S, RUN_LIMIT_S, Cell, Outcome, finish, left_alone, wait_until
from benchmarks.kills.fault import Fault, Phase
from benchmarks.kills.strike import HOST_PHASE
from plugins.hosts.benchmarks.simulated_hosts import Hosts, simulated_hosts

HostKind = Literal["cut", "blip", "worker killed", "controller killed", "stopped"]
HostPhase = Literal["idle", "generate", "forward_backward", "push", "pull"]
_HOSTS = ("h1", "h2", "h3")
_OPTIONS = ("--hosts", "trainer=tcp://h1,tcp://h2", "--hosts", "generator=tcp://h3")
_LAYOUT = Fault("trainer rank 1 of 2", "SIGSTOP", "generate", "grpo")
_BLIP_S = 10.0
_GONE_S = 30.0
_UNDERWAY_S = 0.5
_DEADLINE_S = 60.0  # so that a host is found lost, after 20 s, and not a call too slow
_ENDS_WITHIN_S = 60.0  # a run that names a lost host first tries to go on without it
_WORKER = (" worker --listen ", " ownloop_hosts.worker_process ")


@dataclass(frozen=True, slots=True)
class HostFault:
    """Something that happens to a host in a phase of a step."""

    kind: HostKind
    phase: HostPhase
    host: str
    """Of a killed controller this is "ctl"."""

    def __str__(self) -> str:
        return f"{self.host} {self.kind} in {self.phase}"

    def environment(self, folder: Path) -> dict[str, str]:
        """What tells a run when to strike, and processes on hosts to be busy then."""
        phase: Phase = "generate" if self.phase == "idle" else self.phase
        return {**Fault("trainer", "SIGSTOP", phase, "grpo").environment(folder), HOST_PHASE: self.phase}


def covering_host_faults() -> list[HostFault]:
    """Twenty-five: every kind in every phase. Both roles are hurt in every phase, and by every kind but one.

    Mostly the host is hurt that computes in the phase, since calls to it are then in flight.
    """
    phases: Sequence[HostPhase] = get_args(HostPhase)
    chosen: list[HostFault] = []
    for round_ in range(len(phases)):  # each has every kind once and every phase once
        for index, kind in enumerate(get_args(HostKind)):
            phase = phases[(round_ + index) % len(phases)]
            role_computes = round_ % 2 == 0
            trainer_is_hurt = (phase in ("forward_backward", "push")) == role_computes
            host = _HOSTS[round_ // 2 % 2] if trainer_is_hurt else "h3"
            chosen.append(HostFault(kind, phase, "ctl" if kind == "controller killed" else host))
    return chosen


class HostCell:
    """A run over hosts, which live as long as the block."""

    def __init__(self, folder: Path, model: Path, fault: HostFault | None, stack: ExitStack) -> None:
        """Makes the hosts and starts their workers."""
        folder.mkdir(parents=True)
        environment = {} if fault is None else fault.environment(folder)
        self.hosts: Hosts = stack.enter_context(simulated_hosts("ctl", *_HOSTS))
        for host in _HOSTS:
            self.hosts.start_worker(host, env=environment)
        shell = ["sh", "-c", f'cd "{folder}" && exec "$@"', "sh"]
        self.cell = Cell(folder, model, _LAYOUT, self.hosts.command("ctl", shell), deadline_s=_DEADLINE_S)
        self.environment = environment

    def strike(self, fault: HostFault) -> None:
        """Hurts the host. A blip is over when this returns."""
        match fault.kind:
            case "cut":
                self.hosts.cut(fault.host)
            case "blip":
                self.hosts.cut(fault.host)
                time.sleep(_BLIP_S)
                self.hosts.heal(fault.host)
            case "worker killed":
                self.hosts.kill_worker(fault.host)
            case "controller killed":
                self.hosts.signal("ctl", signal.SIGKILL)
            case "stopped":
                self.hosts.signal(fault.host, signal.SIGSTOP)

    def mend(self, fault: HostFault) -> None:
        """Undoes it, for a run that is to be resumed."""
        match fault.kind:
            case "cut":
                self.hosts.heal(fault.host)
            case "worker killed":
                self.hosts.start_worker(fault.host)
            case "stopped":
                self.hosts.signal(fault.host, signal.SIGCONT)
            case _:
                pass

    def names(self, host: str) -> bool:
        """Whether the run has said, on its terminal or in its log, that a host is lost."""
        log = self.cell.run / "logs" / "controller.log"
        said = self.cell.output() + (log.read_text(errors="replace") if log.exists() else "")
        return f"host {host} is lost" in said

    def num_left(self) -> int:
        """Processes on hosts, workers aside, that do not end by themselves in time. They are killed."""
        wait_until(lambda: not self._left(), _GONE_S)
        left = self._left()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def _left(self) -> list[int]:
        workers = {pid for host in _HOSTS for words in _WORKER for pid in self.hosts.processes(host, words)}
        return [pid for host in _HOSTS for pid in self.hosts.processes(host) if pid not in workers]


def whole_run(folder: Path, model: Path) -> Path:
    """The folder of a run over hosts that nobody hurts."""
    with ExitStack() as stack:
        hurt = HostCell(folder, model, None, stack)
        return left_alone(hurt.cell, _OPTIONS)


def hurt_host(fault: HostFault, folder: Path, model: Path, whole: Path) -> Outcome:
    """Hurts a host of a run, resumes the run if it does not go on by itself, and compares it with a `whole` one."""
    outcome, struck = Outcome(str(fault)), folder / "struck"
    with ExitStack() as stack:
        hurt = HostCell(folder, model, fault, stack)
        process = hurt.cell.start(extra=hurt.environment, options=_OPTIONS)
        wait_until(lambda: struck.exists() or process.poll() is not None, RUN_LIMIT_S, every_s=0.02)
        if not struck.exists():
            outcome.hung, outcome.what = True, "the fault never struck"
            return outcome
        time.sleep(_UNDERWAY_S)
        begin = time.monotonic()
        hurt.strike(fault)
        mended: list[int] = []

        def mend() -> None:
            if not mended:
                hurt.mend(fault)
            mended.append(hurt.num_left())

        wait_until(lambda: hurt.names(fault.host) or process.poll() is not None, ERROR_WITHIN_S)
        named_s = time.monotonic() - begin if hurt.names(fault.host) else math.inf
        finish(
            *(hurt.cell, outcome, process, begin, whole), before_resume=mend, keep=True, error_within_s=_ENDS_WITHIN_S
        )
        mend()
        outcome.processes_left += sum(mended)
        _judge(outcome, fault, named_s)
    if outcome.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _judge(outcome: Outcome, fault: HostFault, named_s: float) -> None:
    """Notes an error that does not name its host in time, and a short interruption that was noticed."""
    if fault.kind in ("cut", "worker killed", "stopped"):
        if math.isinf(named_s):
            outcome.hung = True
            outcome.notes.append(f"no error names the host within {ERROR_WITHIN_S:.0f} s")
        else:
            outcome.what += f"; named after {named_s:.0f} s"
    if fault.kind == "blip" and (math.isfinite(named_s) or outcome.what != "goes on"):
        outcome.hung = True
        outcome.notes.append("a short interruption was not survived")
