"""A generator that cannot answer: what the program then did is no attempt of the policy."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from controller.processes.errors import MeshError
from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_agents.endpoint import agent_endpoint
from ownloop_agents.open_session import SessionLimits
from ownloop_agents.programs import AgentTask, Program, exit_code, run_agents
from ownloop_agents.records import RECORD, CallRecord
from rl.types import SamplingParams

PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [], "stream": sys.argv[1] == "stream"}
for text in ("first", "second", "second", "third"):
    body["messages"] = [{"role": "user", "content": text}]
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    except OSError:
        pass
"""
NUMBERS: Any = {"tokens": (7,), "logprobs": (-1.0,), "versions": (0,), "prompt_tokens": (5, 6)}


class FailingGenerator:
    """Answers each request, but fails those with these numbers."""

    def __init__(self, failing: tuple[int, ...], how: str) -> None:
        self._failing, self._how, self.repeats = failing, how, list[int]()

    async def openai(self, call: OpenAICall) -> OpenAIReply:
        self.repeats.append(call.extra.repeat)
        fails = len(self.repeats) in self._failing
        if fails and self._how == "died":
            raise MeshError("generator", "rank 0 died")
        if fails and self._how == "raised":
            raise RuntimeError("no memory")
        if fails and self._how == "500":
            return OpenAIReply(status=500, body='\n{"error": {"message": "no memory"}}')
        if fails and self._how == "given up":
            return OpenAIReply(status=200, body="\n{}")
        digest = str(len(self.repeats))
        told: Any = {"parent": None, "how": "root", "prompt": "", "text": "w", "finish_reason": "stop", "kept": None}
        record = CallRecord(**NUMBERS, **told, digest=digest, constrained=False).as_json()
        if self._how != "stream":
            return OpenAIReply(status=200, body=f"{record}\n{{}}")

        async def events() -> AsyncGenerator[str]:
            if not fails:
                yield f"{RECORD}{record}"
            yield "data: [DONE]\n\n"

        return OpenAIReply(status=200, body=events())


@pytest.mark.stranger("2.B1")
@pytest.mark.parametrize("how", ["died", "raised", "500", "given up", "stream"])
@pytest.mark.parametrize(("failing", "num_calls"), [((4,), 0), ((2, 3), 0), ((2,), 3)], ids=["last", "both", "one"])
def test_an_outage_fails_the_attempt_unless_the_request_was_answered_later(
    how: str, failing: tuple[int, ...], num_calls: int
) -> None:
    generator: Any = FailingGenerator(failing, how)

    async def main() -> Any:
        limits = SessionLimits(max_calls=num_calls or 4)  # what was not answered does not count
        async with agent_endpoint(generator, SamplingParams(max_tokens=4), limits) as endpoint:
            program = Program(argv=[sys.executable, "-c", PROGRAM, how], sandbox="local")
            return await run_agents(endpoint, program, [AgentTask(id="a")], exit_code)

    (group,) = asyncio.run(main())
    assert [len(session.calls) for session in group.sessions] == [num_calls] * (num_calls > 0)
    if num_calls:
        assert (group.rewards.tolist(), generator.repeats) == ([1.0], [0, 0, 0, 0])
    else:
        assert "requests of the program were not answered: " in group.failures[0]
