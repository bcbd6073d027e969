"""Answers a program's requests inside a generator's process, and notes the tokens that were read and sampled.

    request ---> vLLM's serving code ---> CapturingRenderer.preprocess_chat: the prompt's exact tokens (`splicing.py`)
                        |
                        +---------------> CapturingClient.generate: our sampling; tokens, log-probs, versions are noted
    answer  <--- the record as one line of JSON, then vLLM's answer; in a stream the record comes before the last events

All of vLLM's dialects pass through these two places, streams too, and parsers work behind them. The generator keeps no
session: a request brings the earlier calls along. What depends on vLLM's own structure is in this file alone.
"""

import asyncio
import contextvars
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from pydantic import BaseModel
from vllm.config import ModelConfig
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind

from generator.conversion import bounded, kept_sets
from generator.engine import GenerationEngine
from generator.openai_calls import OpenAICall
from ownloop_agents.asked import check_request, check_tools, limit_tokens, our_sampling, wants_form, whole_parts
from ownloop_agents.records import RECORD, CallRecord, SessionRequest
from ownloop_agents.splicing import Message, Prompt, digests, find_prompt, hide_control_tokens
from ownloop_server.openai_serving import EngineClient, OpenAIServing
from rl.rollouts.tokenizer import TextEncoder
from rl.system.hf_config import end_token_ids, read_config

# Options of a template that do not change what earlier messages say.
_NOT_CONTEXT = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template")


@dataclass(slots=True)
class _Now:
    """The request in hand, in the order in which its fields become known."""

    session: SessionRequest
    request: Any = None
    constrained: bool = False
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The options of the chat template."""
    conversation: list[Message] = field(default_factory=list[Message])
    prompt: Prompt | None = None
    parser_class: type[Parser] | None = None
    record: CallRecord | None = None

    @property
    def context(self) -> list[tuple[str, object]]:
        """What the digests of the conversation begin with."""
        return sorted((name, value) for name, value in self.options.items() if name not in _NOT_CONTEXT and value)


_NOW: ContextVar[_Now] = ContextVar("now")  # per request: vLLM's methods take no argument of ours through to each other


@dataclass(slots=True)
class _Sampled:
    """What was sampled so far."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    masks: list[object] = field(default_factory=list[object])
    """vLLM's form of the tokens that a cut left."""
    text: str = ""

    def add(self, sample: CompletionOutput) -> None:
        """Adds what a part of the output has."""
        rows: Any = sample.logprobs or []
        self.logprobs += [row[token].logprob for row, token in zip(rows, sample.token_ids, strict=True)]
        self.tokens += sample.token_ids
        self.text += sample.text
        if sample.sampling_mask is not None:
            self.masks += sample.sampling_mask.token_ids


@dataclass(slots=True)
class _Template:
    """A model's chat template with one request's options; implements `splicing.Template`."""

    encoder: TextEncoder
    stops: frozenset[int]
    model_config: ModelConfig
    tokenizer: Any
    options: Mapping[str, object]

    def render(self, conversation: Sequence[Message], *, opened: bool) -> str:
        """The conversation as text; `opened` for an answer to follow."""
        messages: Any = [dict(message) for message in conversation]
        options: Any = {
            **self.options,
            "add_generation_prompt": opened,
            "continue_final_message": False,
            "tokenize": False,
        }
        return str(safe_apply_chat_template(self.model_config, self.tokenizer, messages, **options))


class CapturingRenderer(OnlineRenderer):
    """Continues a session's exact tokens where a request continues its messages."""

    async def preprocess_chat(self, request: object, messages: list[Any], *args: Any, **options: Any) -> Any:
        """As vLLM's, with the prompt's tokens replaced. Raises ValueError for what cannot be captured exactly."""
        check_tools(request)  # before vLLM renders: an error costs nothing
        now = _NOW.get()
        now.request, now.constrained = request, wants_form(request)  # before a parser adds a form of its own
        # vLLM's own tokens, which may differ from what was sampled before
        try:
            made: Any = await super().preprocess_chat(request, messages, *args, **options)
        except RecursionError:  # no SDK repeats a 400
            raise ValueError("the arguments of a tool call are nested too deeply") from None
        conversation, inputs = made
        template = self._template(request, options)
        now.conversation, now.parser_class = list(conversation), self.parser
        now.options = {} if template is None else template.options
        if inputs[0].get("type") == "multimodal":
            raise ValueError("the messages have an image; sessions of agents are of text: leave it out")
        rendered = inputs[0]["prompt_token_ids"]
        if template is not None:
            shown, hidden = hide_control_tokens(conversation, template.encoder)
            if hidden:
                rendered = template.encoder.rendered(template.render(shown, opened=True), hidden)
        now.prompt = find_prompt(rendered, conversation, now.context, now.session.earlier, template)
        # the engine samples after these tokens, not after vLLM's own
        inputs[0]["prompt_token_ids"] = list(now.prompt.tokens)
        return conversation, inputs

    def _template(self, request: Any, options: Mapping[str, Any]) -> _Template | None:
        """The template with a request's options; None for a tokenizer without templates of Hugging Face's kind."""
        if not isinstance(self.renderer, HfRenderer):
            return None
        defaults = {**(options["default_template_kwargs"] or {}), "tools": options["tool_dicts"], "tokenize": False}
        chat = request.build_chat_params(options["default_template"], options["default_template_content_format"])
        shown = chat.with_defaults(defaults).get_apply_chat_template_kwargs()
        tokenizer = self.renderer.get_tokenizer()
        model = Path(self.model_config.model)
        # some models end a turn with another token than their tokenizer says
        stops = {*end_token_ids(model, read_config(model)), tokenizer.eos_token_id} - {None}
        return _Template(TextEncoder(tokenizer), frozenset(stops), self.model_config, tokenizer, shown)


class CapturingClient(EngineClient):
    """Samples as the session says, and makes the record of a call."""

    def generate(
        self, prompt: object, sampling_params: vllm.SamplingParams, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of one request."""
        now = _NOW.get()
        config = self.model_config
        ours = bounded(now.session.sampling, config.get_vocab_size(), masks_all=config.return_sampling_mask)
        assert now.prompt is not None
        repeat, tokens = now.session.repeat, now.prompt.tokens
        params = our_sampling(sampling_params, ours, repeat, tokens, constrained=now.constrained)
        # the super call begins nothing until it is iterated
        return self._captured(now, super().generate(prompt, params, request_id, **options), params)

    async def _captured(
        self, now: _Now, outputs: AsyncGenerator[RequestOutput], params: vllm.SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        sampled = _Sampled()
        async with aclosing(outputs):
            async for output in outputs:
                sample = output.outputs[0]
                if params.output_kind != RequestOutputKind.DELTA:
                    sampled = _Sampled()  # each output then repeats the ones before it
                sampled.add(sample)
                if sample.finish_reason in ("stop", "length"):  # otherwise vLLM gave the request up
                    now.record = self._record(now, sampled, sample)
                yield output

    def _record(self, now: _Now, sampled: _Sampled, last: CompletionOutput) -> CallRecord:
        assert now.prompt is not None
        tokenizer = self.renderer.get_tokenizer()
        new, ours = now.prompt.tokens[now.prompt.num_earlier :], now.session.sampling  # the parent has the rest
        kept = kept_sets(sampled.masks) if sampled.masks and ours.cuts and ours.temperature > 0 else None
        answer = self._answer(now, sampled.text, sampled.tokens)
        return CallRecord(
            parent=now.prompt.parent,
            how=now.prompt.how,
            prompt_tokens=tuple(new),
            prompt=tokenizer.decode(new),
            tokens=tuple(sampled.tokens),
            logprobs=tuple(sampled.logprobs),
            versions=tuple(
                # of each token: a pull may come in the middle of an answer
                int(span.version)
                for span in last.weight_versions or ()
                for _ in range(span.start, span.end)
            ),
            text=tokenizer.decode(sampled.tokens),
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            kept=None if kept is None else [kept.part(n, n + 1).ids.tolist() for n in range(len(kept))],
            # of everything up to and with this answer, for the next request to find
            digest=digests([*now.conversation, answer], now.context)[-1],
            constrained=now.constrained,
        )

    def _answer(self, now: _Now, text: str, tokens: Sequence[int]) -> Message:
        """The answer as the client reads it, and will send it back."""
        if now.parser_class is None:
            return {"role": "assistant", "content": text}  # without a parser the text is the content
        assert now.prompt is not None
        tokenizer, tools = self.renderer.get_tokenizer(), now.request.tools
        options = dict(now.options)
        parser = now.parser_class(tokenizer, tools, model_config=self.model_config, chat_template_kwargs=options)
        # some parsers need to know whether the prompt has opened a thought
        parser.set_prompt_token_ids(now.prompt.tokens)
        reasoning, content, calls = parser.parse(text, now.request, bool(tools), tokens)
        said = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or ()]
        return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": said}


class CapturingServing(OpenAIServing):
    """Answers chat completions, Responses and Anthropic messages of a session. `OpenAICall.extra` is its request."""

    renderer_class = CapturingRenderer
    client_class = CapturingClient

    def __init__(self, engine: GenerationEngine, *, tool_parser: str, reasoning_parser: str) -> None:
        """Raises ValueError as the base does, and for gpt-oss, whose prompts vLLM makes in a way of their own."""
        # vLLM's chat serving, which the other two dialects wrap
        super().__init__(engine, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        chat: Any = self._chat
        if chat.online_renderer.use_harmony:
            raise ValueError("gpt-oss is not supported at an agent's endpoint; train it with an environment of rl.envs")
        options = {**self.template, "online_renderer": chat.online_renderer}
        responses = OpenAIServingResponses(chat.engine_client, chat.models, **options)
        messages = AnthropicServingMessages(chat.engine_client, chat.models, "assistant", **options)
        parser = _lenient(chat.parser_cls)  # the one that all three, and the records, were given
        chat.parser_cls = messages.parser_cls = responses.parser = chat.online_renderer.parser = parser
        self._dialects: dict[str, tuple[Any, Any]] = {
            "chat/completions": (ChatCompletionRequest, chat.create_chat_completion),
            "responses": (ResponsesRequest, responses.create_responses),
            "messages": (AnthropicMessagesRequest, messages.create_messages),
            "messages/count_tokens": (AnthropicCountTokensRequest, messages.count_tokens),
        }

    async def answer(self, call: OpenAICall) -> tuple[int, str | AsyncGenerator[str]]:
        """The status, and a line with the record, if there is one, and then JSON; or the events of a stream."""
        now = _Now(call.extra)
        _NOW.set(now)  # before vLLM is called; its tasks inherit the context
        status, body = await super().answer(call)
        if not isinstance(body, str):
            # the events are read later, in a task of another context
            return status, _with_record(body, now, contextvars.copy_context())
        return status, f"{'' if now.record is None else now.record.as_json()}\n{body}"

    async def _answer(self, call: OpenAICall) -> Any:
        request_type, create = self._dialects[call.kind]
        body = whole_parts(json.loads(call.body))
        self.check_shown(body if isinstance(body, dict) else {})
        request = request_type.model_validate_json(json.dumps(body))
        request.model = call.model  # vLLM refuses names that it does not serve, and the program's is free
        check_request(request)
        if call.kind == "messages" and request.messages and request.messages[-1].role == "assistant":
            raise ValueError("messages end with the assistant's, which no answer continues here; end with the user's")
        if call.kind != "messages/count_tokens":
            limit_tokens(request, min(call.extra.sampling.max_tokens, self._chat.model_config.max_model_len))
        result = await create(request)
        if call.kind.startswith("messages") and not isinstance(result, ErrorResponse | AsyncGenerator):
            return _WithoutNulls(result)
        return result


def _lenient(parser_class: Any) -> Any:
    """The parser, to which a text that it cannot read is an answer in words.

    Several of vLLM's raise for arguments that are nested deeply, and the answer would be lost.
    """
    if parser_class is None:
        return None

    class Lenient(parser_class):
        def parse(self, model_output: str, *args: object, **options: object) -> Any:
            try:
                return super().parse(model_output, *args, **options)
            except Exception:
                return None, model_output, None

        def parse_delta(self, delta_text: str, *args: object, **options: object) -> Any:
            try:
                return super().parse_delta(delta_text, *args, **options)
            except Exception:
                return DeltaMessage(content=delta_text)

    return Lenient


class _WithoutNulls:
    """An answer whose empty fields are left out, as Anthropic's clients expect."""

    def __init__(self, result: BaseModel) -> None:
        self._result = result

    def model_dump(self, mode: str) -> dict[str, object]:
        """Plain values."""
        return self._result.model_dump(mode=mode, exclude_none=True)

    def model_dump_json(self) -> str:
        """JSON."""
        return str(self._result.model_dump_json(exclude_none=True))


async def _with_record(events: AsyncGenerator[object], now: _Now, context: contextvars.Context) -> AsyncGenerator[str]:
    """The events of a stream as text. The record follows as soon as all is sampled, before the client can know of it.

    vLLM looks at context variables while events are taken, so each is taken in the request's own context.
    """
    sent = False
    async with aclosing(events):
        while True:
            # each event in the request's context, where `_NOW` is this request's
            event = await asyncio.create_task(_next(events), context=context)
            if now.record is not None and not sent:
                sent = True
                yield RECORD + now.record.as_json()
            if event is None:
                return
            yield event if isinstance(event, str) else _as_event(event)


def _as_event(event: Any) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


async def _next(events: AsyncGenerator[object]) -> object:
    return await anext(events, None)
