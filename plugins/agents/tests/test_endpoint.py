"""Sessions at an endpoint: their keys, their limits, their end, and programs that behave badly."""

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from generator.engine import GenerationEngine
from ownloop_agents.endpoint import AgentEndpoint, OpenSession, SessionLimits, agent_endpoint
from plugins.agents.tests.chatting import endpoint_over
from rl.types import SamplingParams
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.paced]
ASK: list[Any] = [{"role": "user", "content": "there"}]


def client_of(endpoint: AgentEndpoint, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=key, max_retries=0)


async def ask(endpoint: AgentEndpoint, session: OpenSession, messages: list[Any] = ASK) -> Any:
    return await client_of(endpoint, session.key).chat.completions.create(model="m", messages=messages)


async def test_a_request_belongs_to_the_session_of_its_key(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine) as endpoint:
        one, two = endpoint.begin("one"), endpoint.begin("two")
        await asyncio.gather(ask(endpoint, one), ask(endpoint, two))
        in_path = openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{two.key}/v1", api_key="none", max_retries=0)
        await in_path.chat.completions.create(model="m", messages=ASK)
        named = {"x-session-id": f"{two.key}.3"}  # as verifiers' client names its rollouts
        await client_of(endpoint, "EMPTY").chat.completions.create(model="m", messages=ASK, extra_headers=named)
        others = {"x-session-id": one.key}  # a key of its own comes first
        await client_of(endpoint, two.key).chat.completions.create(model="m", messages=ASK, extra_headers=others)
        assert [len(one.calls), len(two.calls)] == [1, 4]
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            await client_of(endpoint, one.key + "x").chat.completions.create(model="m", messages=ASK)
        await endpoint.end(one)
        with pytest.raises(openai.AuthenticationError):
            await ask(endpoint, one)
        await ask(endpoint, two)
        assert [len(one.calls), len(two.calls)] == [1, 5]


async def test_a_key_may_be_sent_in_several_ways(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine, max_tokens=2) as endpoint, httpx.AsyncClient() as http:
        session = endpoint.begin("a")
        for headers in (
            {"authorization": f"bearer  {session.key}"},
            {"authorization": session.key},
            {"x-api-key": "none", "authorization": f"Bearer {session.key}"},
            {"x-api-key": session.key, "authorization": "Bearer none"},
        ):
            body = {"messages": ASK}
            answer = await http.post(f"{endpoint.url}/v1/chat/completions", headers=headers, json=body)
            assert answer.status_code == 200, headers
        assert len(session.calls) == 4


async def test_programs_find_what_they_look_for_first(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine) as endpoint, httpx.AsyncClient() as http:
        headers = {"x-api-key": endpoint.begin("a").key}
        assert (await http.get(endpoint.url, headers=headers)).status_code == 200
        assert [model.id async for model in client_of(endpoint, headers["x-api-key"]).models.list()] == ["policy"]
        assert (await client_of(endpoint, headers["x-api-key"]).models.retrieve("org/gpt")).id == "org/gpt"
        missing = await http.post(f"{endpoint.url}/v1/embeddings", headers=headers, json={})
        assert (missing.status_code, "chat/completions" in missing.text) == (404, True)


async def test_limits_answer_with_400_and_say_which(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine, limits=SessionLimits(max_calls=2)) as endpoint:
        session = endpoint.begin("a")
        await asyncio.gather(ask(endpoint, session), ask(endpoint, session))
        with pytest.raises(openai.BadRequestError, match="max_calls is 2"):
            await ask(endpoint, session)
        assert (session.ended_by, len(session.calls)) == ("call_limit", 2)
    limits = SessionLimits(max_sampled_tokens=30, max_body_bytes=5000)
    async with endpoint_over(chat_engine, limits=limits, ignore_eos=True) as endpoint:
        session = endpoint.begin("a")
        for _ in range(2):
            await ask(endpoint, session)
        assert session.num_sampled == 30
        with pytest.raises(openai.BadRequestError, match="max_sampled_tokens, 30"):
            await ask(endpoint, session)
        with pytest.raises(openai.BadRequestError, match="5000 bytes"):
            await ask(endpoint, session, [{"role": "user", "content": "x" * 6000}])
        assert session.ended_by == "token_limit"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"[" * 100_000,
        b'{"messages": 1e999}',
        b"\xff\xfe",
        b"null",
        pytest.param(b"[" + b"0," * 2**20 + b"0]", marks=pytest.mark.stranger("2.A9")),
    ],
)
async def test_bodies_that_are_no_request_are_refused(chat_engine: GenerationEngine, body: bytes) -> None:
    async with endpoint_over(chat_engine) as endpoint, httpx.AsyncClient() as http:
        session = endpoint.begin("a")
        for dialect in ("chat/completions", "responses", "messages"):
            headers = {"authorization": f"Bearer {session.key}"}
            answer = await http.post(f"{endpoint.url}/v1/{dialect}", headers=headers, content=body)
            assert answer.status_code == 400
            assert not answer.json()["error"]["message"].startswith(("Expecting", "'utf-8' codec"))
        await ask(endpoint, session)
        assert len(session.calls) == 1


async def test_many_requests_at_once_wait_for_their_places(chat_engine: GenerationEngine) -> None:
    limits = SessionLimits(max_calls=200, max_parallel=4)
    async with endpoint_over(chat_engine, max_tokens=4, limits=limits) as endpoint:
        greedy, other = endpoint.begin("greedy"), endpoint.begin("other")
        many = asyncio.gather(*(ask(endpoint, greedy) for _ in range(30)))
        await until(lambda: chat_engine.num_unfinished, "the first of them")
        assert chat_engine.num_unfinished <= 4
        await ask(endpoint, other)
        assert not many.done()
        await many
        assert (len(greedy.calls), len(other.calls)) == (30, 1)


async def test_the_end_of_a_session_ends_its_requests(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine, max_tokens=3000, ignore_eos=True) as endpoint:
        session = endpoint.begin("a")
        client: Any = client_of(endpoint, session.key)
        whole = asyncio.create_task(ask(endpoint, session))
        events = await client.chat.completions.create(model="m", messages=ASK, stream=True)  # and never reads on
        await until(lambda: chat_engine.num_unfinished == 2, "both requests")
        await endpoint.end(session)
        assert not session.running
        await until(lambda: not chat_engine.num_unfinished, "both to be gone")
        with pytest.raises(openai.AuthenticationError, match="has ended"):
            await whole
        assert session.calls == []
        await events.close()


async def test_a_client_that_says_half_and_stays_hinders_no_one(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine) as endpoint:
        session = endpoint.begin("a")
        host, port = endpoint.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: {session.key}\r\ncontent-length: 100\r\n\r\n{{"
            half.sendall(head.encode())
            await until(lambda: session.running, "its request")
            await ask(endpoint, endpoint.begin("b"))
            await endpoint.end(session)
            assert not session.running


async def test_a_new_system_prompt_every_turn_is_a_root_each(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine) as endpoint:
        session, chat = endpoint.begin("a"), ASK
        for turn in range(4):
            system = {"role": "system", "content": f"it is {turn} o'clock"}
            answer = await ask(endpoint, session, [system, *chat])
            said = answer.choices[0].message.content
            chat = [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        assert [call.how for call in session.calls] == ["root"] * 4


async def test_an_error_has_the_form_of_its_dialect(chat_engine: GenerationEngine) -> None:
    async with endpoint_over(chat_engine) as endpoint, httpx.AsyncClient() as http:
        headers = {"x-api-key": endpoint.begin("a").key}
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "word " * 3000}]}
        answers = [
            await http.post(f"{endpoint.url}/v1/{dialect}", headers=headers, content=json.dumps(body))
            for dialect in ("messages", "chat/completions")
        ]
        assert [answer.status_code for answer in answers] == [400, 400]
        assert [sorted(answer.json()) for answer in answers] == [["error", "type"], ["error"]]


async def test_what_cannot_be_trained_or_served_is_refused() -> None:
    anything: Any = object()
    with pytest.raises(ValueError, match=r"sampling.temperature is 0"):
        await agent_endpoint(anything, SamplingParams(max_tokens=4, temperature=0.0)).__aenter__()
    with pytest.raises(ValueError, match="launch"):
        await agent_endpoint(anything, SamplingParams(max_tokens=4)).__aenter__()
    with pytest.raises(ValueError, match=r"max_calls is 0"):
        SessionLimits(max_calls=0)
