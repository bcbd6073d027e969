"""64 sessions at once for five minutes, while each of two generators is killed once."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from controller.commands.processes import descendants
from controller.handles.generator_router import GeneratorRouter
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig
from ownloop_agents.endpoint import SessionLimits, agent_endpoint
from ownloop_agents.programs import AgentTask, Attempt, Program, run_agents
from ownloop_agents.sessions import session_to_data, trained_calls
from ownloop_sandbox.sandboxes import Work
from plugins.agents.tests.chatting import chat_model
from rl.types import SamplingParams
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NUM_SESSIONS = 64
SECONDS = 300.0
MOST_OF_A_CALL = 8 << 10
"""Bytes that a session may keep of each call, until it is scored: tokens, log-probs and texts."""
SCRIPT = r"""
import http.client, json, os, sys, time, urllib.request
until, stream = time.time() + float(sys.argv[1]), int(sys.argv[2]) % 2 == 1
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}

def ask(chat):
    body = json.dumps({"messages": chat, "stream": stream, "return_token_ids": True}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        if not stream:
            choice = json.load(answer)["choices"][0]
            return choice["message"]["content"], choice["token_ids"]
        text, tokens, ended = "", [], False
        for line in answer:
            event = line.removeprefix(b"data: ").strip()
            ended = ended or event == b"[DONE]"
            for choice in json.loads(event).get("choices") or () if event.startswith(b"{") else ():
                text += choice["delta"].get("content") or ""
                tokens += choice.get("token_ids") or []
        if not ended:
            raise OSError("the stream was cut")
        return text, tokens

got, chat, failed = [], [], 0
while time.time() < until:
    chat = [*chat[-8:], {"role": "user", "content": f"number {len(got)}"}]
    while True:
        try:
            said, tokens = ask(chat)
            break
        except (OSError, http.client.HTTPException):
            failed += 1
            time.sleep(0.2)
    got.append(tokens)
    chat.append({"role": "assistant", "content": said})
json.dump([got, failed], open("got.json", "w"))
"""


async def _same_tokens(task: AgentTask, work: Work, attempt: Attempt) -> float:
    """How often the program had to ask again. Raises unless each answer that it got was captured once."""
    got, failed = json.loads((work / "got.json").read_text())
    captured = Counter(call.turn.completion.tokens for call in attempt.calls if call.delivered)
    assert captured == Counter(map(tuple, got)), task.id
    return float(failed)


async def test_sessions_survive_generators_and_leave_nothing(tmp_path: Path) -> None:
    config = GeneratorConfig(dtype="float32", max_model_len=2048, max_num_seqs=64, num_replicas=2)
    model, before, memory = chat_model(tmp_path / "model"), descendants(), list[int]()
    limits = SessionLimits(max_calls=10**6, max_sampled_tokens=10**9)

    async def kill_each(router: GeneratorRouter, start: float) -> None:
        for number in range(2):
            await asyncio.sleep(start + SECONDS * (number + 1) / 3 - time.monotonic())
            memory.append(psutil.Process().memory_info().rss)
            mesh = router._replicas[number].generator.mesh  # pyright: ignore
            os.kill(mesh.pids[0], signal.SIGKILL)
            await until(lambda: router.states != ("serving", "serving"), "its end to be noticed")
            await until(lambda: router.states == ("serving", "serving"), "both to serve again")

    async with Launcher(tmp_path / "logs") as launcher:
        router = await launcher.generator(model, config)
        assert isinstance(router, GeneratorRouter)
        async with agent_endpoint(router, SamplingParams(max_tokens=24, seed=0), limits) as endpoint:
            argv = [sys.executable, "-I", "-S", "-c", SCRIPT, str(SECONDS), "{prompt}"]
            program = Program(argv=argv, sandbox="local", time_limit_s=4 * SECONDS, max_at_once=NUM_SESSIONS)
            tasks = [AgentTask(id=str(i), prompt=str(i)) for i in range(NUM_SESSIONS)]
            killing = asyncio.create_task(kill_each(router, time.monotonic()))
            groups = await run_agents(endpoint, program, tasks, _same_tokens)
            await killing
            memory.append(psutil.Process().memory_info().rss)
    assert [failure for group in groups for failure in group.failures] == []
    sessions = [session for group in groups for session in group.sessions]
    assert len(sessions) == NUM_SESSIONS
    for session in sessions:
        scored = sum(datum.num_loss_tokens for datum in session_to_data(session, 1.0))
        assert scored == session.num_sampled_tokens
    calls, retries = sum(len(trained_calls(session)) for session in sessions), sum(s.reward for s in sessions)
    print(f"{calls} calls, {retries:g} asked again, {[rss >> 20 for rss in memory]} MiB")
    assert retries > 0
    assert memory[-1] - memory[0] < calls * MOST_OF_A_CALL
    wait_until(lambda: not set(descendants()) - set(before), "the processes to end")
