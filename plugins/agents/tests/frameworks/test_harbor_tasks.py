"""Tasks of Harbor: how a trial is started, and what its result becomes.

Most tests have a stand-in for the command `harbor`. The slow test needs Harbor 0.26 and bubblewrap, and OWNLOOP_HARBOR,
which names the command.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.engine import GenerationEngine
from ownloop_agents.harbor_tasks import HarborTasks
from ownloop_agents.programs import run_agents
from ownloop_agents.sessions import SessionGroup
from plugins.agents.tests.chatting import endpoint_over

pytestmark = [pytest.mark.vllm, pytest.mark.seconds, pytest.mark.paced]
REAL = os.environ.get("OWNLOOP_HARBOR", "")
HARBOR = """#!{python}
import json, os, pathlib, sys, urllib.request
words = sys.argv[1:]
given = dict(zip(words[2::2], words[3::2]))
task = pathlib.Path(given["--path"])
url = given["--agent-kwarg"].removeprefix("api_base=") + "/chat/completions"
body = json.dumps({{"messages": [{{"role": "user", "content": (task / "instruction.md").read_text()}}]}}).encode()
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
result = json.loads((task / "result").read_text())
folder = pathlib.Path(given["--trials-dir"], "trial-1")
folder.mkdir(parents=True)
(folder / "result.json").write_text(json.dumps({{**result, "words": words}}))
"""
ERROR = {"exception_type": "AgentTimeoutError", "exception_message": "after 600 s"}
RESULTS: dict[str, Any] = {
    "good": {"reward_valid": True, "exception_info": None, "verifier_result": {"rewards": {"reward": 0.5, "speed": 2}}},
    "late": {"reward_valid": True, "exception_info": ERROR, "verifier_result": {"rewards": {"reward": 0.0}}},
    "lost": {"reward_valid": False, "exception_info": ERROR, "verifier_result": None},
    "none": {"reward_valid": False, "exception_info": None, "verifier_result": None},
    "other": {"reward_valid": True, "exception_info": None, "verifier_result": {"rewards": {"score": 1.0}}},
}


def _tasks(folder: Path, names: dict[str, Any]) -> Path:
    for name, result in names.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "task.toml").write_text("")
        (folder / name / "instruction.md").write_text(f"do {name}")
        (folder / name / "result").write_text(json.dumps(result))
    return folder


def _command(folder: Path) -> Path:
    file = folder / "harbor"
    file.write_text(HARBOR.format(python=sys.executable))
    file.chmod(0o755)
    return file


async def test_results_are_carried_over_and_errors_are_failures(chat_engine: GenerationEngine, tmp_path: Path) -> None:
    held_out = _tasks(tmp_path / "held-out", {"test": RESULTS["good"]})
    env = HarborTasks(
        harbor=_command(tmp_path), tasks=_tasks(tmp_path / "tasks", RESULTS), held_out=held_out, environment="docker"
    )
    found: list[SessionGroup] = []

    async with endpoint_over(chat_engine, max_tokens=8) as endpoint:
        found.extend(await run_agents(endpoint, env.program, env.train_problems(0, 0, 5), env.reward))
    groups = {group.task_id: group for group in found}
    assert {name: group.prompt for name, group in groups.items()} == {name: f"do {name}" for name in RESULTS}
    good, late = (groups[name].sessions[0] for name in ("good", "late"))
    assert (good.reward, good.metrics, good.ended_by, len(good.calls)) == (0.5, {"speed": 2.0}, "exit", 1)
    assert (late.reward, late.ended_by) == (0.0, "own_limit")
    assert "AgentTimeoutError: after 600 s" in groups["lost"].failures[0]
    assert "the verifier gave no reward" in groups["none"].failures[0]
    assert "gave ['score'], and no 'reward', which is reward_name" in groups["other"].failures[0]
    assert [task.id for task in env.eval_problems(1)] == ["test"]


def test_a_wrong_folder_or_command_is_refused_at_once(tmp_path: Path) -> None:
    command = _command(tmp_path)
    with pytest.raises(ValueError, match="which cannot be run; install harbor"):
        HarborTasks(harbor=tmp_path / "none", tasks=tmp_path, environment="docker")
    with pytest.raises(ValueError, match="0 training and 0 held-out tasks; both are needed"):
        HarborTasks(harbor=command, tasks=tmp_path, environment="docker")
    tasks = _tasks(tmp_path / "tasks", {f"task-{i}": {} for i in range(40)})
    env = HarborTasks(harbor=command, tasks=tasks, environment="docker")
    held_out = {task.id for task in env.eval_problems(2)}
    assert not held_out & {task.id for task in env.train_problems(0, 0, 40)}
    with pytest.raises(ValueError, match="num_eval is 40, but 'tasks' has only"):
        env.eval_problems(40)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs OWNLOOP_HARBOR")
async def test_a_task_of_harbor_itself(chat_engine: GenerationEngine, tmp_path: Path) -> None:
    for name, right in {"easy": "yes", "hard": "no"}.items():
        task = tmp_path / "tasks" / name
        for part in ("environment", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60\n[agent]\ntimeout_sec = 60\n')
        (task / "instruction.md").write_text("Write yes into /app/answer.txt.")
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (task / "tests" / "test.sh").write_text(
            f'[ "$(cat /app/answer.txt)" = {right} ] && echo 1 > /logs/verifier/reward.txt'
            " || echo 0 > /logs/verifier/reward.txt\n"
        )
    (tmp_path / "asking.py").write_text(ASKING)
    options = ("--agent-kwarg", "api_base={base_url}")
    tasks = tmp_path / "tasks"
    env = HarborTasks(harbor=Path(REAL), tasks=tasks, agent="asking:Asking", options=options, held_out=tasks)
    groups: list[SessionGroup] = []

    async with endpoint_over(chat_engine, max_tokens=8) as endpoint:
        program = env.program
        path = f"{program.env['PYTHONPATH']}:{tmp_path}"
        made = replace(program, env={**program.env, "PYTHONPATH": path})
        groups.extend(await run_agents(endpoint, made, env.eval_problems(2), env.reward, num_samples=2))
    assert [group.failures for group in groups] == [(), ()]
    assert [[session.reward for session in group.sessions] for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert all(len(session.calls) == 2 for group in groups for session in group.sessions)


ASKING = '''
import json, os, urllib.request
from harbor.agents.base import BaseAgent

class Asking(BaseAgent):
    """Asks the model twice, and writes yes through the environment."""

    def __init__(self, *args, api_base, **kwargs):
        super().__init__(*args, **kwargs)
        self.api_base = api_base

    @staticmethod
    def name():
        return "asking"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        chat = [{"role": "user", "content": instruction}]
        headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        for _ in range(2):
            body = json.dumps({"messages": chat}).encode()
            request = urllib.request.Request(self.api_base + "/chat/completions", body, headers)
            said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        result = await environment.exec("echo yes > answer.txt; cat answer.txt")
        assert (result.return_code, result.stdout) == (0, "yes\\n"), result
'''
