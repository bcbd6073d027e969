"""Environments of verifiers: their process, their tasks, what their outcomes become, and what happens if they fail.

Most tests run the worker with a stand-in for the package. The slow test needs an environment with verifiers 0.4 and uv,
and OWNLOOP_VERIFIERS_PYTHON, which names its Python.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from generator.engine import GenerationEngine
from ownloop_agents.programs import run_agents
from ownloop_agents.sessions import SessionGroup, session_to_data
from ownloop_agents.verifiers_tasks import VerifiersTasks, worker_of
from plugins.agents.tests.chatting import endpoint_over
from tests.generator.running import run_paced
from tests.waiting import children, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.seconds, pytest.mark.paced]
REAL = os.environ.get("OWNLOOP_VERIFIERS_PYTHON", "")
CONFIG = {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
STAND_IN = '''
"""What the worker uses of verifiers 0.4, with a harness that asks its model once."""
import asyncio, contextlib, itertools, json, sys, time, types, urllib.request
from types import SimpleNamespace as Thing

class Environment:
    def __init__(self, config):
        if config["taskset"]["id"] == "missing":
            raise ModuleNotFoundError("taskset 'missing' not found")
        self.config = Thing(retries=Thing(max_retries=config.get("retries", 0), rules=[]))
        count = config["taskset"].get("num_tasks")
        numbers = itertools.count() if count is None else range(count)
        self.taskset = (Thing(key=f"key-{i}", data=Thing(prompt=f"sum {i}", kind=i % 8)) for i in numbers)
        self.trainable = config.get("trainable", True)

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context, on_trace):
        trace = Thing(id="minted", rewards={}, metrics={}, errors=[], calls=[1], is_truncated=False)
        trace.agent = Thing(name="agent", trainable=self.trainable)
        on_trace(trace)
        if task.data.kind == 1:
            raise RuntimeError("unlucky")
        if task.data.kind == 2:
            return Thing(ok=False, traces=[trace], errors=[Thing(type="TaskError", message="no image")])
        body = json.dumps({"messages": [{"role": "user", "content": task.data.prompt}]}).encode()
        headers = {"content-type": "application/json", "x-session-id": trace.id, "authorization": "Bearer EMPTY"}
        request = urllib.request.Request(context.client.base_url + "/chat/completions", body, headers)
        await asyncio.to_thread(urllib.request.urlopen, request)
        trace.rewards["right"] = Thing(score=0.5)
        trace.metrics["length"] = 7.0
        trace.reward, trace.is_truncated = 0.25, task.data.kind == 3
        return Thing(ok=True, traces=[trace], errors=[])

def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)

module("verifiers.v1.utils.loaders", resolve_env_config=dict, load_environment=Environment)
module("verifiers.v1.configs.agent", agent_config_fields=lambda config: {})
module("verifiers.v1.clients", EvalClientConfig=Thing, ModelContext=Thing)
'''


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """A Python that has the stand-in. Its workers have ended after the test."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    yield file
    worker_of.cache_clear()
    assert not children("verifiers_worker.py")


def play(engine: GenerationEngine, env: VerifiersTasks, count: int, num_samples: int = 1) -> list[SessionGroup]:
    groups: list[SessionGroup] = []

    async def main() -> None:
        async with endpoint_over(engine, max_tokens=8) as endpoint:
            tasks = sorted(env.train_problems(0, 0, count), key=lambda task: int(task.id.removeprefix("key-")))
            groups.extend(await run_agents(endpoint, env.program, tasks, env.reward, num_samples=num_samples))

    run_paced(main())
    return groups


def test_outcomes_are_carried_over_and_errors_are_failures(chat_engine: GenerationEngine, python: Path) -> None:
    env = VerifiersTasks(python=python, config={"taskset": {"id": "sums", "num_tasks": 8}}, held_out={"num_tasks": 3})
    groups = play(chat_engine, env, 8)
    assert [group.prompt for group in groups] == [f"sum {i}" for i in range(8)]
    assert "RuntimeError: unlucky" in groups[1].failures[0]
    assert "TaskError: no image" in groups[2].failures[0]
    assert not groups[1].sessions
    sessions = [session for group in groups for session in group.sessions]
    assert [session.reward for session in sessions] == [0.25] * 6
    assert sessions[0].metrics == {"right": 0.5, "length": 7.0}
    assert [session.ended_by for session in sessions] == ["exit", "own_limit", *["exit"] * 4]
    assert all(len(session.calls) == 1 and session_to_data(session, 1.0) for session in sessions)
    assert [task.id for task in env.eval_problems(3)] == ["key-0", "key-1", "key-2"]
    with pytest.raises(ValueError, match="num_eval is 4, but 'sums' has only 3 held-out tasks"):
        env.eval_problems(4)


def test_a_worker_that_died_is_started_again(chat_engine: GenerationEngine, python: Path) -> None:
    env = VerifiersTasks(python=python, config={"taskset": {"id": "sums", "num_tasks": 40}})
    (worker,) = children("verifiers_worker.py")
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its end")
    assert play(chat_engine, env, 1)[0].task_id


def test_tasks_are_held_out_by_their_text(python: Path) -> None:
    env = VerifiersTasks(python=python, config={"taskset": {"id": "sums"}}, max_tasks=100)  # of an endless taskset
    training = {task.prompt for task in env.train_problems(0, 0, 100)}
    held_out = {task.prompt for task in env.eval_problems(5)}
    assert not training & held_out
    assert env.train_problems(3, 0, 10) == [*env.train_problems(3, 0, 4), *env.train_problems(3, 4, 6)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"taskset": {"id": "missing"}}, "ModuleNotFoundError: taskset 'missing' not found"),
        ({"taskset": {"id": "sums"}, "retries": 2}, "leave retries.max_retries at 0"),
        ({"taskset": {"id": "sums", "num_tasks": 0}}, "0 training and 0 held-out tasks; both are needed"),
    ],
)
def test_what_verifiers_refuses_is_an_error_at_once(python: Path, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifiersTasks(python=python, config=config)
    with pytest.raises(ValueError, match="which is no file; name the Python"):
        VerifiersTasks(python=python / "none", config=config)


async def test_an_agent_that_is_not_to_be_trained_is_refused(chat_engine: GenerationEngine, python: Path) -> None:
    config = {"taskset": {"id": "sums", "num_tasks": 40}, "trainable": False}
    env = VerifiersTasks(python=python, config=config, held_out={"num_tasks": 1})
    (task,) = (task for task in env.train_problems(0, 0, 40) if task.id == "key-0")
    groups: list[SessionGroup] = []

    async with endpoint_over(chat_engine, max_tokens=8) as endpoint:
        groups.extend(await run_agents(endpoint, env.program, [task], env.reward))
    assert "'agent' is not to be trained and asks the policy" in groups[0].failures[0]


SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.metric()
    async def said(self, trace: vf.Trace) -> float:
        if self.data.answer == 3:
            raise ValueError("unlucky")
        return float(len(trace.last_reply))

class SumConfig(vf.TasksetConfig):
    num_tasks: int = 12

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        rows = [SumData(prompt=f"What is {i} + {i + 1}?", answer=2 * i + 1) for i in range(self.config.num_tasks)]
        return [SumTask(row, self.config.task) for row in rows]

__all__ = ["Sums"]
"""


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs OWNLOOP_VERIFIERS_PYTHON")
async def test_an_environment_of_verifiers_itself(
    chat_engine: GenerationEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = VerifiersTasks(python=Path(REAL), config=CONFIG, held_out={"num_tasks": 2})
    groups: list[SessionGroup] = []

    async with endpoint_over(chat_engine, max_tokens=8) as endpoint:
        tasks = env.train_problems(0, 0, 12)
        groups.extend(await run_agents(endpoint, env.program, tasks, env.reward, num_samples=2))
    unlucky = [group for group in groups if group.failures]
    assert [(group.prompt, len(group.failures)) for group in unlucky] == [("What is 1 + 2?", 2)]
    assert "unlucky" in unlucky[0].failures[0]
    sessions = [session for group in groups for session in group.sessions]
    assert len(sessions) == 22
    for session in sessions:
        assert {"right", "said"} <= session.metrics.keys()
        assert session.reward == 0.5 * session.metrics["right"]
        assert len(session.calls) == 1
    with pytest.raises(ValueError, match="not found"):
        VerifiersTasks(python=Path(REAL), config={"taskset": {"id": "no-such-taskset"}})
