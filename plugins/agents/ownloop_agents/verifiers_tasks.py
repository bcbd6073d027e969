"""Environments of verifiers 0.4, by name: https://github.com/PrimeIntellect-ai/verifiers.

    VerifiersTasks(python=Path("verifiers-env/bin/python"), config={"taskset": {"id": "gsm8k"}, "agent": {...}})

verifiers asks for other versions of packages than ownloop does, so it runs in a Python environment of its own:

    run_agents -> a small program, one per episode ---socket---> `verifiers_worker.py`, in verifiers' own Python
                                                                      harness and runtime of the environment
    endpoint   <-------------------- requests of the harness -------'

The worker loads the environment once and plays many episodes. It ends with this process.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ownloop_agents.programs import AgentTask, Attempt, Program, Scored
from ownloop_sandbox.sandboxes import Work
from rl.data.rows import python_order, split, stream

_START_S = 120.0
_END_S = 5.0
_LOOK_S = 0.02
_WORKER = Path(__file__).with_name("verifiers_worker.py")
_ASK = r"""
import json, os, socket, sys
task = json.load(open("task.json"))
worker = socket.socket(socket.AF_UNIX)
worker.connect(task["worker"])
asked = {"index": task["index"], "base_url": os.environ["OPENAI_BASE_URL"], "key": os.environ["OPENAI_API_KEY"]}
worker.sendall(json.dumps(asked).encode() + b"\n")
answer = worker.makefile().readline()
open("outcome.json", "w").write(answer)
print(answer)
sys.exit(not answer or "error" in json.loads(answer))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A task of the environment."""

    id: str
    index: int
    prompt: str


@dataclass(frozen=True, kw_only=True)
class VerifiersTasks:
    """The tasks of one environment of verifiers; an `AgentEnv`. A tenth of them is held out, or `held_out` has them."""

    python: Path
    """The Python of an environment that has verifiers 0.4 and the taskset. Most harnesses need `uv` in the same folder,
    or on PATH."""
    config: Mapping[str, Any]
    """What verifiers calls the env: `taskset`, `agent` with its harness and runtime, and so on, by its own names."""
    held_out: Mapping[str, object] | None = None
    """Options of `taskset` for held-out tasks, such as {"split": "test"}. None holds a tenth of all tasks out."""
    max_tasks: int = 10_000
    """Tasks that are read of the taskset, which may be endless."""
    time_limit_s: float = 1800.0
    """How long an episode with its scoring may take; a longer one fails."""
    max_at_once: int = 32
    """Episodes at the same time."""
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Starts the worker. Raises ValueError if verifiers is not there, or does not accept the configuration."""
        if not self.python.is_file():
            raise ValueError(
                f"VerifiersTasks.python is {self.python}, which is no file; name the Python of an environment "
                "with `pip install verifiers==0.4.0`"
            )
        if not self._split[0] or not self._split[1]:
            found = f"{len(self._split[0])} training and {len(self._split[1])} held-out tasks"
            raise ValueError(f"VerifiersTasks.config {self.name!r} has {found}; both are needed")

    @property
    def name(self) -> str:
        """The environment's name."""
        taskset = str(self.config.get("taskset", {}).get("id", ""))
        return f"{self.config['id']}+{taskset}" if self.config.get("id") else taskset

    @property
    def program(self) -> Program:
        """A program that has the worker play the task of its folder."""
        return Program(
            argv=[sys.executable, "-I", "-S", "-c", _ASK],  # isolated: it needs no package
            sandbox="local",  # the worker is trusted, and the harness brings its own runtime
            time_limit_s=self.time_limit_s,
            idle_limit_s=self.time_limit_s,
            max_at_once=self.max_at_once,
        )

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        """See `AgentEnv`. Every epoch has every task once, in an order of its own."""
        worker = self._worker()
        return [_task(row, worker) for row in stream(self._split[0], python_order, seed, start, count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        """The first held-out tasks. Raises ValueError if there are fewer."""
        rows = self._split[1]
        if count > len(rows):
            raise ValueError(f"num_eval is {count}, but {self.name!r} has only {len(rows)} held-out tasks")
        worker = self._worker(held_out=True)
        return [_task(row, worker) for row in rows[:count]]

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> Scored:
        """The environment's own reward, metrics and truncation. Raises RuntimeError with its own error."""
        del task, attempt
        # empty if the worker died with the connection open
        outcome = json.loads((work / "outcome.json").read_text() or '{"error": "the worker of verifiers has ended"}')
        if "error" in outcome:
            raise RuntimeError(outcome["error"])
        return Scored(**outcome)

    @cached_property
    def _split(self) -> tuple[Sequence[_Row], Sequence[_Row]]:
        """Training and held-out tasks."""
        rows = self._worker().tasks(self.max_tasks)
        if self.held_out is None:
            # by content: a new version of a taskset keeps its split
            return split(rows, lambda row: row.prompt or row.id)
        return rows, self._worker(held_out=True).tasks(self.max_tasks)

    def _worker(self, *, held_out: bool = False) -> "VerifiersProcess":
        config = dict(self.config)
        if held_out and self.held_out is not None:
            config["taskset"] = {**config["taskset"], **self.held_out}  # the same environment with other tasks
        # sorted: equal configurations share a worker
        worker = worker_of(self.python, json.dumps(config, sort_keys=True))
        worker.start_if_ended()
        return worker


class VerifiersProcess:
    """A process of verifiers with one environment."""

    def __init__(self, python: Path, config: str) -> None:
        """`config` is JSON. Starts nothing."""
        self._python, self._config = python, config
        self._folder = Path(tempfile.mkdtemp(prefix="ownloop-verifiers-"))
        self.socket = self._folder / "worker"
        self._processes: list[subprocess.Popen[bytes]] = []
        """The newest one, if it was started."""
        weakref.finalize(self, _end, self._processes, self._folder)  # also if the environment object is never closed

    def start_if_ended(self) -> None:
        """Starts it unless it runs, and waits until it has loaded the environment.

        Raises ValueError with its last line of output if that fails.
        """
        if self._processes and self._processes[0].poll() is None:
            return
        self.socket.unlink(missing_ok=True)  # of a worker that died
        command = [str(self._python), str(_WORKER), str(self.socket), self._config]
        env = {**os.environ, "PATH": f"{self._python.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"}
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(
                # its standard input stays open as long as this process lives
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[:] = [process]
        until = time.monotonic() + _START_S
        while not self.socket.exists():
            if process.poll() is not None or time.monotonic() > until:
                # the last line of a traceback says what is wrong
                said = (self._folder / "log").read_text(errors="replace").strip().splitlines()
                last = said[-1] if said else f"it did not start in {_START_S:g} s"
                raise ValueError(f"VerifiersTasks.config is {self._config}; verifiers in {self._python} says: {last}")
            time.sleep(_LOOK_S)

    def tasks(self, count: int) -> list[_Row]:
        """The first tasks of its taskset. Raises ValueError with an error of the taskset."""
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(self.socket))
            worker.sendall(json.dumps({"tasks": count}).encode() + b"\n")
            found: Any = json.loads(worker.makefile().readline())
        if isinstance(found, dict):
            raise ValueError(f"verifiers cannot read the taskset: {found['error']}")
        return [_Row(id=each["id"], index=index, prompt=each["prompt"]) for index, each in enumerate(found)]


@lru_cache(maxsize=8)
def worker_of(python: Path, config: str) -> VerifiersProcess:  # keyed by text: configurations are not hashable
    """The worker for a configuration, as JSON. It ends when it falls out of this cache, and with this process."""
    return VerifiersProcess(python, config)


def _end(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # it notices the end of its input
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _task(row: _Row, worker: VerifiersProcess) -> AgentTask:
    files = {"task.json": json.dumps({"worker": str(worker.socket), "index": row.index})}
    return AgentTask(id=row.id, prompt=row.prompt, files=files)
