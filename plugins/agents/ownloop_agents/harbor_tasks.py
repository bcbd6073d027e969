"""Tasks of Harbor 0.26, each a folder with an instruction and tests: https://harborframework.com.

    HarborTasks(harbor=Path("harbor-env/bin/harbor"), tasks=Path("tasks"), agent="terminus-2", options=(...))

Harbor needs Python 3.12 and an environment of its own. One `harbor trial start` is one episode: Harbor runs the agent
and the task's tests in an environment, by default one without containers (`harbor_environment.py`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ownloop_agents.programs import AgentTask, Attempt, Program, Scored
from ownloop_sandbox import ways
from ownloop_sandbox.sandboxes import Work, check_sandbox
from rl.data.rows import python_order, split, stream

_TRIALS = "trials"
_OURS = "harbor_environment:BoxEnvironment"
# the command is `$0`, its words follow
_START = 'exec "$0" trial start --path "$(cat task-path)" --trials-dir trials "$@"'


@dataclass(frozen=True, kw_only=True)
class HarborTasks:
    """The tasks of a folder; an `AgentEnv`. A tenth of them is held out, or `held_out` has them."""

    harbor: Path
    """The command `harbor` of an environment with Harbor."""
    tasks: Path
    """A folder with a folder for each task."""
    agent: str = "terminus-2"
    """One of Harbor's agents, or `module:Class`."""
    options: tuple[str, ...] = ("--agent-kwarg", "api_base={base_url}")
    """Further options of `harbor trial start`. `{base_url}` is the endpoint's address with /v1."""
    environment: str = _OURS
    """What `--env` names: one of Harbor's environments, such as docker, or `module:Class`."""
    held_out: Path | None = None
    """A folder with the held-out tasks. None holds a tenth of `tasks` out, by their names."""
    reward_name: str = "reward"
    """Which of the verifier's rewards is trained; the others are metrics."""
    time_limit_s: float = 3600.0
    """How long an episode with its tests may take; a longer one fails."""
    max_at_once: int = 32
    """Episodes at the same time."""
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted, and where no sandbox works."""
        if self.environment == _OURS:
            check_sandbox("auto")  # a task without a sandbox would run on the host
        if not os.access(self.harbor, os.X_OK):
            raise ValueError(
                f"HarborTasks.harbor is {self.harbor}, which cannot be run; install harbor in an "
                "environment of Python 3.12 and name its bin/harbor"
            )
        if not all(self._split):
            found = f"{len(self._split[0])} training and {len(self._split[1])} held-out tasks"
            raise ValueError(
                f"HarborTasks.tasks is {self.tasks}, with {found}; both are needed, each a folder with a task.toml"
            )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.tasks.name

    @property
    def program(self) -> Program:
        """Harbor, for the task of the program's folder."""
        words = ("--agent", self.agent, "--model", "openai/policy", "--env", self.environment)
        # Harbor imports the environment by its module's name
        env = {"PYTHONPATH": str(Path(__file__).parent), "HARBOR_TELEMETRY": "0"}
        if self.environment == _OURS:
            way = check_sandbox("auto")
            env |= {"OWNLOOP_SANDBOX": str(Path(ways.__file__).parent), "OWNLOOP_WAY": way}
            if way == "bubblewrap":  # that of the package is in no PATH
                env["PATH"] = f"{Path(ways.bwrap_file()).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        return Program(
            argv=["sh", "-c", _START, str(self.harbor.absolute()), *words, *self.options],
            env=env,
            sandbox="local",  # Harbor itself is trusted; its tasks run in its environment
            time_limit_s=self.time_limit_s,
            idle_limit_s=self.time_limit_s,  # a verifier may run for long without a request
            max_at_once=self.max_at_once,
        )

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        """See `AgentEnv`. Every epoch has every task once, in an order of its own."""
        return [_task(folder) for folder in stream(self._split[0], python_order, seed, start, count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        """The first held-out tasks. Raises ValueError if there are fewer."""
        folders = self._split[1]
        if count > len(folders):
            raise ValueError(f"num_eval is {count}, but {self.name!r} has only {len(folders)} held-out tasks")
        return [_task(folder) for folder in folders[:count]]

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> Scored:
        """The verifier's reward. Raises RuntimeError with Harbor's own error if it did not come to a reward."""
        del task
        results = [name for name in work.names if PurePosixPath(name).match(f"{_TRIALS}/*/result.json")]
        if not results:
            raise RuntimeError(f"Harbor has no result (status {attempt.exit_code}): {attempt.output[-500:]}")
        result: dict[str, Any] = json.loads(work.read(results[0]))  # one trial, one result
        error: Mapping[str, str] | None = result["exception_info"]
        if not result["reward_valid"]:
            why = (
                "the verifier gave no reward"
                if error is None
                else "{exception_type}: {exception_message}".format(**error)
            )
            raise RuntimeError(why)
        rewards: dict[str, float] = result["verifier_result"]["rewards"]
        if self.reward_name not in rewards:
            raise RuntimeError(
                f"the verifier gave {sorted(rewards)}, and no {self.reward_name!r}, which is reward_name"
            )
        others = {name: float(value) for name, value in rewards.items() if name != self.reward_name}
        # an error that still has a reward is a limit, such as of turns
        return Scored(reward=rewards[self.reward_name], metrics=others, truncated=error is not None)

    @cached_property
    def _split(self) -> tuple[list[Path], list[Path]]:
        """Folders of training and held-out tasks."""
        if self.held_out is None:
            return split(_folders(self.tasks), lambda folder: folder.name)
        return _folders(self.tasks), _folders(self.held_out)


def _folders(tasks: Path) -> list[Path]:
    # absolute: Harbor runs in another folder
    return sorted(file.parent.absolute() for file in tasks.glob("*/task.toml"))


def _task(folder: Path) -> AgentTask:
    instruction = folder / "instruction.md"
    prompt = instruction.read_text(encoding="utf-8") if instruction.is_file() else folder.name
    return AgentTask(id=folder.name, prompt=prompt, files={"task-path": str(folder)})
