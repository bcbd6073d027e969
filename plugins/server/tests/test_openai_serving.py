"""vLLM's serving code over an engine, called in its process."""

import asyncio
import json

import pytest

from generator.engine import GenerationEngine
from generator.openai_calls import OpenAICall, OpenAIRequests
from ownloop_server.openai_serving import OpenAIServing
from tests.generator.engines import EngineFactory
from tests.generator.served_models import served_llama

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, build_engine: EngineFactory) -> GenerationEngine:
    return build_engine(served_llama(tmp_path_factory.mktemp("serving") / "model", tied=True), "float32")


def test_parsers_that_vllm_does_not_have_are_refused(engine: GenerationEngine) -> None:
    with pytest.raises(ValueError, match=r"tool_parser is 'nonsense'.*vLLM cannot use"):
        OpenAIServing(engine, tool_parser="nonsense", reasoning_parser="")
    with pytest.raises(ValueError, match=r"reasoning_parser 'nonsense'.*vLLM cannot use"):
        OpenAIServing(engine, tool_parser="", reasoning_parser="nonsense")
    assert OpenAIServing(engine, tool_parser="pythonic", reasoning_parser="")


def test_tools_without_a_parser_are_refused(engine: GenerationEngine) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = json.dumps({"messages": [{"role": "user", "content": "w3"}], "tools": [tool]}).encode()
    call = OpenAICall(kind="chat", body=body, policy=None, model="tiny")
    status, answer = asyncio.run(OpenAIServing(engine, tool_parser="", reasoning_parser="").answer(call))
    assert status == 400
    assert isinstance(answer, str)
    assert "tool" in json.loads(answer)["error"]["message"]


async def test_a_request_that_is_cancelled_while_the_code_is_loaded_is_not_answered(engine: GenerationEngine) -> None:
    requests = OpenAIRequests(engine)
    body = json.dumps({"prompt": [3], "max_tokens": 1}).encode()
    call = OpenAICall(kind="completions", body=body, policy=None, model="tiny")
    begun = [asyncio.create_task(requests.begin(call_id, call)) for call_id in ("first", "second")]
    await asyncio.sleep(0)
    requests.cancel("first")
    with pytest.raises(RuntimeError, match="cancelled"):
        await begun[0]
    assert (await begun[1])[0] == 200
