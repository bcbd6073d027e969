"""OpenAI's endpoints over a `GenerationEngine`, by vLLM's own serving code.

vLLM renders chats, checks requests, cuts streams into events and finds tool calls; here it is given an engine. Which
policy a request samples from is the caller's to say, and not the request's.
"""

import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, cast

import vllm
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.llm_engine import LLMEngine

from generator.engine import GenerationEngine
from generator.openai_calls import OpenAICall, Serving
from rl.images import images_of
from rl.rollouts.chats import Message, check_fields
from rl.rollouts.rendering import opening_of
from rl.types import DELIMITERS, REASONING, Answer

# vLLM hands a request on by itself, and knows policies only as LoRA directories.
CALL: ContextVar[OpenAICall] = ContextVar("call")
"""The request that vLLM's code is answering."""
_REASONER = "ownloop_reasoner"  # in a request's `extra_args`: name and options of the parser that ends its reasoning
_LONGEST_DELIMITER = max(map(len, [*REASONING, *REASONING.values()]))


class EngineClient:
    """What vLLM's serving code asks of `vllm.engine.protocol.EngineClient`."""

    errored = dead_error = None  # an engine that has stopped says so at the next request

    def __init__(self, engine: GenerationEngine, llm: LLMEngine, reasoning_parser: str = "") -> None:
        _patch_reasoners(llm)
        self._engine = engine
        self._reasoning_parser = reasoning_parser
        self.vllm_config = llm.vllm_config
        self.model_config = copy.copy(llm.model_config)
        self.model_config.max_model_len = engine.max_model_len
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Accepts every request; it waits for its turn."""
        del n, request_id

    def generate(
        self, prompt: Any, sampling_params: vllm.SamplingParams, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of one request. The policy is looked up now, not when the outputs are taken.

        They raise ValueError if the form that is asked for allows no token.
        """
        del request_id
        tokens = prompt["prompt_token_ids"]
        if prompt["type"] == "multimodal" and not images_of(tokens):
            raise ValueError("truncate_prompt_tokens is not supported with images; send a shorter prompt")
        reasons = self._reasoning_parser and not options.get("reasoning_ended")
        reasoner = self._reasoning_parser, options.get("reasoning_parser_kwargs") or {}
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), _REASONER: reasoner if reasons else None}
        return _in_form(self._engine.stream(tokens, sampling_params, policy=CALL.get().policy))


def _patch_reasoners(engine: Any) -> None:
    """Has a form that a request asks for hold behind its reasoning, by the request's own parser (`_REASONER`).

    vLLM knows one parser, which it must be given at the start; here every endpoint over an engine has its own.
    """
    manager = engine.engine_core.engine_core.structured_output_manager

    def find(request: Any) -> Any:
        structured = request.structured_output_request
        name, options = (request.sampling_params.extra_args or {}).get(_REASONER) or ("", {})
        if structured.reasoner is None and name:
            structured.reasoner = ReasoningParserManager.get_reasoning_parser(name)(manager.tokenizer, **options)
        return structured.reasoner

    manager._get_reasoner = find


async def _in_form(outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    """The outputs. vLLM ends a request in "error" where its grammar allows no token, as a schema of itself alone."""
    async with aclosing(outputs):
        async for output in outputs:
            if any(sample.finish_reason == "error" for sample in output.outputs):
                raise ValueError(
                    "the form that the request asks for (response_format, structured_outputs or a tool's parameters) "
                    "allows no answer: its schema or grammar must come to an end"
                )
            yield output


class OpenAIServing(Serving):
    """Answers OpenAI's chats and completions. A subclass may replace its two classes."""

    renderer_class = OnlineRenderer
    client_class = EngineClient

    def __init__(self, engine: GenerationEngine, *, tool_parser: str, reasoning_parser: str) -> None:
        """Raises ValueError for a parser that vLLM cannot use with this model, and for a model without tokenizer."""
        llm = engine.llm
        if llm.renderer.tokenizer is None:
            raise ValueError("the model's directory has no tokenizer, which OpenAI's endpoints need")
        client: Any = self.client_class(engine, llm, reasoning_parser)
        models = _AnyModel(client, [BaseModelPath(name="", model_path=llm.model_config.model)])
        self.template: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "tool_parser": tool_parser or None,
            "enable_auto_tools": bool(tool_parser),
            "reasoning_parser": reasoning_parser,
        }
        try:
            renderer = self.renderer_class(client.model_config, llm.renderer, **self.template)
            self._chat = OpenAIServingChat(client, models, "assistant", online_renderer=renderer, **self.template)
        except Exception as error:  # vLLM's parsers raise what they like
            raise ValueError(
                f"tool_parser is {tool_parser!r} and reasoning_parser {reasoning_parser!r}, which vLLM cannot use with "
                f"this model: {error}"
            ) from error
        self._chat.parser_cls = _by_our_rules(self._chat.parser_cls)
        self._completion = OpenAIServingCompletion(client, models, online_renderer=renderer, request_logger=None)

    async def answer(self, call: OpenAICall) -> tuple[int, str | AsyncGenerator[str]]:
        """The status, and JSON or the events of a stream."""
        CALL.set(call)
        try:
            result = await self._answer(call)
        except Exception as error:
            result = self._chat.create_error_response(error)
        status = int(result.error.code) if isinstance(result, ErrorResponse) else 200
        return status, result if isinstance(result, AsyncGenerator) else _as_json(result)

    def check_shown(self, request: Mapping[str, object]) -> None:
        """Raises ValueError for what the request of a chat holds and the model would not see."""
        try:
            tokenizer: Any = self._chat.renderer.tokenizer
            template = str(tokenizer.get_chat_template(tools=request.get("tools") or None))
        except Exception:  # vLLM says what is missing, and knows models that have no template
            return
        _check_shown(request, template)

    async def _answer(self, call: OpenAICall) -> Any:
        request_type = ChatCompletionRequest if call.kind == "chat" else CompletionRequest
        if call.kind == "chat":
            self.check_shown(json.loads(call.body))
        request: Any = request_type.model_validate_json(call.body)
        if request.use_beam_search:
            raise ValueError("use_beam_search is not supported; use n with a temperature")
        request.model = call.model
        create: Any = self._chat.create_chat_completion if call.kind == "chat" else self._completion.create_completion
        return await create(request)


def _check_shown(request: Mapping[str, object], template: str) -> None:
    """Raises ValueError for what a request of a chat endpoint holds, and vLLM accepts and does not show the model."""
    for name in ("tools", "documents"):
        if request.get(name) and name not in template:
            raise ValueError(f"the request has {name}, and the model's chat template shows none; leave them out")
    for name in ("functions", "mcp_servers"):  # vLLM takes no notice of them
        if request.get(name):
            raise ValueError(f"the request has {name}, which no model here sees; give what can be called as tools")
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        fields = cast("Message", message) if isinstance(message, Mapping) else {}
        check_fields(fields)
        content = fields.get("content")
        for part in content if isinstance(content, list) else ():
            kind = cast("Message", part).get("type") if isinstance(part, Mapping) else None
            if kind == "tool_reference" and kind not in template:
                raise ValueError("a message has a part of type 'tool_reference', which the chat template does not show")


class _Thoughts:
    """Follows a text that comes in pieces through its reasoning, by the rules of `Answer`."""

    def __init__(self, opening: str) -> None:
        """`opening` is as for `Answer.read`."""
        self._opening, self._before = opening, ""

    def add(self, piece: str) -> int:
        """The number of characters of the next piece that belong to reasoning, with its delimiters."""
        text, end = self._before + piece, 0
        for found in DELIMITERS.finditer(text):
            if self._opening and found[0] != REASONING[self._opening]:
                continue
            self._opening, end = found[0] if found[0] in REASONING else "", found.end()
        num_before, self._before = len(self._before), text[max(end, len(text) - _LONGEST_DELIMITER) :]
        return len(piece) if self._opening else max(end - num_before, 0)


def _by_our_rules(parser_class: Any) -> Any:
    """The parser, which reads reasoning as `rl.types.Answer` does.

    A whole answer is no reasoning if the prompt has closed it, as vLLM has it in streams. And without a parser of
    reasoning, a call within a thought is a thought.
    """
    if parser_class is None:
        return None

    class ByOurRules(parser_class):
        ended, opening = False, ""
        thoughts: _Thoughts | None = None

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            super().set_prompt_token_ids(prompt_token_ids)
            self.ended = self.is_reasoning_end([*prompt_token_ids])
            self.opening = opening_of(self.model_tokenizer, prompt_token_ids)

        def extract_reasoning(self, model_output: str, *args: object) -> tuple[str | None, str | None]:
            reasoning, content = super().extract_reasoning(model_output, *args)
            is_all = not content and (reasoning or "").strip() == model_output.strip()
            return (None, model_output) if self.ended and is_all else (reasoning, content)

        def parse(self, model_output: str, *args: object, **options: object) -> Any:
            said = Answer.read(model_output, opening=self.opening).content
            if said == model_output or self.reasoning_parser is not None:
                return super().parse(model_output, *args, **options)
            thought = model_output.removesuffix(said) if model_output.endswith(said) else ""
            reasoning, content, calls = super().parse(said, *args, **options)
            return reasoning, thought + (content or "") if calls else model_output, calls

        def parse_delta(
            self, delta_text: str, delta_token_ids: Any, request: Any, prompt_token_ids: Any = None, **options: Any
        ) -> Any:
            if self.thoughts is None:
                self.thoughts = _Thoughts(opening_of(self.model_tokenizer, prompt_token_ids or ()))
            thought = 0 if self.reasoning_parser is not None else self.thoughts.add(delta_text)
            rest = delta_text[thought:]
            tokens = delta_token_ids if rest or not thought else []
            found = super().parse_delta(rest, tokens, request, prompt_token_ids, **options)
            if thought:
                found = found or DeltaMessage()
                found.content = delta_text[:thought] + (found.content or "")
            return found

    return ByOurRules


def _as_json(result: Any) -> str:
    try:
        return str(result.model_dump_json())
    except ValueError:  # a model may write half a surrogate pair into a tool call, which JSON cannot hold
        return json.dumps(result.model_dump(mode="json"), ensure_ascii=False).encode(errors="replace").decode()


class _AnyModel(OpenAIServingModels):
    """Serves every request, and calls the model by the caller's name for it; the request's own name does not count."""

    def is_base_model(self, model_name: str) -> bool:
        del model_name
        return True

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        del lora_request
        return CALL.get().model
