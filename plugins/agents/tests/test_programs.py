"""Programs as episodes, with programs that know nothing of ownloop."""

import asyncio
import inspect
import os
import sys
import threading
from typing import Any

import psutil
import pytest

from generator.engine import GenerationEngine
from ownloop_agents.open_session import SessionLimits
from ownloop_agents.programs import (
    AgentTask,
    Attempt,
    Command,
    Program,
    Reward,
    RewardFile,
    Scored,
    exit_code,
    run_agents,
)
from ownloop_agents.sessions import SessionGroup, session_to_data
from ownloop_sandbox.sandboxes import Box, Work
from plugins.agents.tests.chatting import endpoint_over
from tests.generator.running import run_paced

pytestmark = [pytest.mark.vllm, pytest.mark.seconds]
ASK = """
import json, os, sys, urllib.request
def ask(chat):
    body = json.dumps({"model": "any", "messages": chat}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
SDK_ASK = """
import sys, openai
client = openai.OpenAI(max_retries=0)
def ask(chat):
    return client.chat.completions.create(model="any", messages=chat).choices[0].message.content
"""
THREE_TURNS = """
chat = [{"role": "user", "content": open("question.txt").read()}]
for turn in range(3):
    said = ask(chat)
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
open("answer.txt", "w").write(sys.argv[1])
print(said)
"""
CHAT, SDK_CHAT = ASK + THREE_TURNS, SDK_ASK + THREE_TURNS  # to import the SDK takes a second and a half


def program(code: str, *more: str, **options: Any) -> Program:
    settings: Any = {"sandbox": "local", **options}
    return Program(argv=[sys.executable, "-c", code, *more], **settings)


def tasks(count: int = 1, **options: Any) -> list[AgentTask]:
    files = {"question.txt": "what is there"}
    return [
        AgentTask(id=str(i), prompt=f"number {i}", files=files, answer=f"number {i}", **options) for i in range(count)
    ]


async def right(task: AgentTask, work: Work, attempt: Attempt) -> float:
    assert attempt.exit_code == 0
    return float((work / "answer.txt").read_text() == task.answer)


def run(engine: GenerationEngine, made: Program, todo: list[AgentTask], reward: Reward = right, **more: Any) -> Any:
    found: list[SessionGroup] = []

    async def main() -> None:
        limits = more.pop("limits", None)
        async with endpoint_over(engine, max_tokens=8, limits=limits) as endpoint:
            found.extend(await run_agents(endpoint, made, todo, reward, **more))
            assert not endpoint.sessions

    run_paced(main())
    return found


@pytest.mark.parametrize("sandbox", ["local", "namespaces", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def test_a_program_that_knows_nothing_becomes_data(chat_engine: GenerationEngine, sandbox: str) -> None:
    try:
        groups = run(chat_engine, program(CHAT, "{prompt}", sandbox=sandbox), tasks(2), num_samples=2, seed=5)
    except ValueError as error:
        pytest.skip(str(error)[:50])
    assert [group.task_id for group in groups] == ["0", "1"]
    sessions = [session for group in groups for session in group.sessions]
    assert not any(group.failures for group in groups), groups[0].failures
    assert [session.reward for session in sessions] == [1.0] * 4
    assert [len(session.calls) for session in sessions] == [3] * 4
    for session in sessions:
        (datum,) = session_to_data(session, 1.0)
        assert datum.num_loss_tokens == session.num_sampled_tokens
    assert len({session.calls[0].turn.completion.tokens for session in sessions}) == 4  # every attempt has its seed


def test_attempts_with_a_seed_are_the_same_again(chat_engine: GenerationEngine) -> None:
    runs = [run(chat_engine, program(CHAT, "x"), tasks(), num_samples=2, seed=5) for _ in range(2)]
    first, second = ([[call.turn for call in session.calls] for session in groups[0].sessions] for groups in runs)
    assert first == second


def test_rewards_come_from_status_commands_and_files(chat_engine: GenerationEngine) -> None:
    hidden = {"tests/check.py": "import pathlib, sys; sys.exit(pathlib.Path('answer.txt').read_text() != 'number 0')"}
    command = Command([sys.executable, "tests/check.py"])
    rewards: list[Reward] = [exit_code, command, RewardFile("answer.txt"), lambda task, work, attempt: 0.25]
    said = ["x", "number 0", "0.5", "x"]
    expected = [1.0, 1.0, 0.5, 0.25]
    for reward, word, value in zip(rewards, said, expected, strict=True):
        (group,) = run(chat_engine, program(CHAT, word), tasks(hidden=hidden, kept=("answer.txt",)), reward)
        assert [session.reward for session in group.sessions] == [value], group.failures
    (group,) = run(chat_engine, program(CHAT, "number 1"), tasks(hidden=hidden, kept=("answer.txt",)), command)
    assert [session.reward for session in group.sessions] == [0.0]


def test_a_reward_may_say_more(chat_engine: GenerationEngine) -> None:
    def scored(task: AgentTask, work: Work, attempt: Attempt) -> Scored:
        del task, attempt
        return Scored(reward=0.5, metrics={"port": float((work / "answer.txt").read_text()[-3] == "/")}, truncated=True)

    (group,) = run(chat_engine, program(SDK_CHAT, "{base_url}"), tasks(), scored)
    (session,) = group.sessions
    assert len(session.calls) == 3
    assert (session.reward, session.metrics, session.ended_by) == (0.5, {"port": 1.0}, "own_limit")
    assert group.as_group().rollouts[0].truncated


@pytest.mark.stranger("2.B7")
def test_a_reward_that_never_returns_fails_and_stops_nothing(
    chat_engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, create = threading.Event(), Box.create

    async def create_slowly(box: Box) -> None:
        await asyncio.sleep(0.5)
        await create(box)

    async def waits(task: AgentTask, work: Work, attempt: Attempt) -> float:
        del task, work
        await attempt.run(["sleep", "0.5"], 60)  # which has a limit of its own, as its sandbox has
        return 0.5

    async def endless(*_: object) -> float:
        return float(await asyncio.Event().wait())

    monkeypatch.setattr(Box, "create", create_slowly)
    rewards: list[Reward] = [lambda *_: float(release.wait(60)), endless, waits]
    try:
        found = [run(chat_engine, program(CHAT, "x", reward_time_limit_s=0.4), tasks(), each)[0] for each in rewards]
    finally:
        release.set()
    assert [group.failures[0].split(": ")[1] for group in found[:2]] == ["it did not answer within 0.4 s"] * 2
    assert [session.reward for session in found[2].sessions] == [0.5]


@pytest.mark.stranger("2.F1")
def test_a_reward_that_raises_says_where(chat_engine: GenerationEngine) -> None:
    def broken(task: AgentTask, work: Work, attempt: Attempt) -> float:
        raise RuntimeError("cannot score")

    (group,) = run(chat_engine, program(CHAT, "x"), tasks(), broken)
    line = inspect.getsourcelines(broken)[1] + 1
    assert group.failures[0].splitlines()[1:] == [f"  {__file__}, line {line}, in broken"]


def test_an_attempt_that_fails_costs_itself_alone(chat_engine: GenerationEngine) -> None:
    def picky(task: AgentTask, work: Work, attempt: Attempt) -> float | Scored:
        del work, attempt
        scored = Scored(reward=1.0, metrics={"step": 3.0}), Scored(reward=1.0, metrics={"steps": float("nan")})
        return {"0": 1.0, "1": float("nan"), "2": scored[0], "3": scored[1]}[task.id]

    groups = run(chat_engine, program(CHAT, "x"), tasks(5), picky)
    assert [len(group.sessions) for group in groups] == [1, 0, 0, 0, 0]
    assert "its reward is nan" in groups[1].failures[0]
    assert "its metric 'step' has the name of one that every run reports; rename it" in groups[2].failures[0]
    assert "its steps is nan; it must be a finite number" in groups[3].failures[0]
    assert "KeyError" in groups[4].failures[0]
    (silent,) = run(chat_engine, program("print('no question')"), tasks(), exit_code)
    assert "made no finished call (status 0): no question" in silent.failures[0]
    (missing,) = run(chat_engine, Program(argv=["no-such-program"], sandbox="local"), tasks(), exit_code)
    assert "no-such-program" in missing.failures[0]
    for prompt in ("y" * 200_000, "é" * 70_000):
        (long,) = run(chat_engine, program(CHAT, "{prompt}"), [AgentTask(id="0", prompt=prompt)], exit_code)
        assert f"an argument of the program has {len(prompt.encode())} bytes" in long.failures[0]


SLEEP = f"time.sleep({1000 + os.getpid()})"  # of no other test's process
ENDLESS = f"""{ASK}
import subprocess
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); {SLEEP}"])
while True:
    ask([{{"role": "user", "content": "x"}}])
"""


@pytest.mark.parametrize(
    ("code", "options", "limits", "ended_by"),
    [
        (ENDLESS, {"time_limit_s": 4.0}, {"max_calls": 10**6, "max_sampled_tokens": 10**9}, "time_limit"),
        (ENDLESS.replace("while True:", "for _ in range(9):"), {}, {"max_calls": 3}, "call_limit"),
        (ENDLESS.replace("while True:", "for _ in range(9):"), {}, {"max_sampled_tokens": 20}, "token_limit"),
        (f"{ENDLESS}    import time; time.sleep(600)", {"idle_limit_s": 1.0}, {}, "idle_limit"),
    ],
)
def test_limits_end_a_program_and_all_its_processes(
    chat_engine: GenerationEngine, code: str, options: Any, limits: Any, ended_by: str
) -> None:
    for factor in (1, 4, 16):  # a busy host may need longer for the first answer than the program may take
        more = {name: value * factor for name, value in options.items()}
        (group,) = run(chat_engine, program(code, **more), tasks(), exit_code, limits=SessionLimits(**limits))
        if group.sessions:
            break
    (session,) = group.sessions
    assert session.ended_by == ended_by
    assert session.calls
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if SLEEP in command]


def test_as_many_programs_run_at_once_as_are_allowed(chat_engine: GenerationEngine) -> None:
    now = most = 0

    async def counted(task: AgentTask, work: Work, attempt: Attempt) -> float:
        nonlocal now, most
        del task, work, attempt
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return 1.0

    groups = run(chat_engine, program(CHAT, "x", max_at_once=2), tasks(4), counted)
    assert len(groups) == 4
    assert most <= 2


def test_what_makes_no_sense_is_refused_at_once(chat_engine: GenerationEngine) -> None:
    with pytest.raises(ValueError, match=r"Program\.argv is 'ls'"):
        Program(argv="ls")
    with pytest.raises(ValueError, match="time_limit_s is 0"):
        Program(argv=["ls"], time_limit_s=0)
    with pytest.raises(ValueError, match="image is empty; sandbox 'docker'"):
        run(chat_engine, program(CHAT, sandbox="docker"), tasks())
    with pytest.raises(ValueError, match="num_samples is 0"):
        run(chat_engine, program(CHAT), tasks(), num_samples=0)
