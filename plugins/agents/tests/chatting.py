"""A tiny chat model whose sampled tokens are seldom those of its text, and an endpoint over an engine of it.

Its tokenizer knows single characters and a few pairs of them. A model with random weights samples "t" and "h" one after
the other, where the tokenizer writes "th": almost every answer drifts when it is tokenised again.
"""

import asyncio
import json
import string
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models

from generator.openai_calls import OpenAICall, OpenAIReply, OpenAIRequests
from ownloop_agents.endpoint import AgentEndpoint, SessionLimits, agent_endpoint
from rl.tiny_models import SERVABLE, tiny_llama
from rl.types import SamplingParams

if TYPE_CHECKING:  # the import would load vLLM
    from generator.engine import GenerationEngine

CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0 to 2. The model stops at the last of them."""
CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def chat_model(
    path: Path, *, template: str = CHAT_TEMPLATE, max_len: int = 4096, more_tokens: Sequence[str] = ()
) -> Path:
    """Writes the model. `more_tokens` are its last ones."""
    characters = "\n" + string.printable[:95]
    pairs = sorted({a + b for a in "abcdefgh" for b in "aeiou"} | {"th", "er", "in", '":', '{"', "</", "<t"})
    vocab = {token: index for index, token in enumerate((*CONTROL, *characters, *pairs, *more_tokens))}
    model = tiny_llama(path, **SERVABLE, vocab_size=-(-len(vocab) // 8) * 8, max_position_embeddings=max_len)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([*more_tokens])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL[2], "pad_token": CONTROL[0]}
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": False}))
    (model / "chat_template.jinja").write_text(template)
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            read = json.loads((model / name).read_text())
            (model / name).write_text(json.dumps({**read, "eos_token_id": 2, "bos_token_id": None}))
    return model


class EngineGenerator:
    """What an endpoint asks of a generator, over an engine of this process."""

    def __init__(self, engine: "GenerationEngine") -> None:
        """The engine stays the caller's."""
        self._requests = OpenAIRequests(engine)

    async def openai(self, call: OpenAICall) -> OpenAIReply:
        call_id = uuid.uuid4().hex

        async def events() -> AsyncGenerator[str]:
            try:
                while (event := await self._requests.next_event(call_id)) is not None:
                    yield event
            finally:
                self._requests.cancel(call_id)

        try:
            status, body = await self._requests.begin(call_id, call)
        except asyncio.CancelledError:
            self._requests.cancel(call_id)
            raise
        return OpenAIReply(status=status, body=events() if body is None else body)


@asynccontextmanager
async def endpoint_over(
    engine: "GenerationEngine",
    *,
    max_tokens: int = 24,
    seed: int | None = 0,
    limits: SessionLimits | None = None,
    tool_parser: str = "hermes",
    reasoning_parser: str = "",
    **more: Any,
) -> AsyncGenerator[AgentEndpoint]:
    """An endpoint on this host. `more` are fields of `SamplingParams`."""
    generator: Any = EngineGenerator(engine)
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **more)
    parsers: Any = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    async with agent_endpoint(generator, sampling, limits, **parsers) as endpoint:
        yield endpoint
