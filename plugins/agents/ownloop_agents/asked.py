"""What a program may ask an agents' endpoint for: how many tokens, which form, and what is refused.

A request is one of vLLM's, of any dialect: chat completions, Responses or Anthropic's messages. Fields that a dialect
lacks count as left out.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import vllm

from rl.rollouts.chats import TEXT_PARTS
from rl.types import SamplingParams

_PARTS = (*TEXT_PARTS, "reasoning", "tool_use", "redacted_thinking", "tool_addition", "tool_removal")
"""Parts that vLLM shows, calls, and what no model is to read."""
_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "custom_tool_call_output",
)
"""Items of Responses that vLLM shows."""


def our_sampling(
    asked: vllm.SamplingParams, ours: SamplingParams, repeat: int, prompt: Sequence[int], *, constrained: bool
) -> vllm.SamplingParams:
    """The session's sampling, with what a request may choose: where it ends, and how its text is shown.

    With `constrained`, the form that it wants holds too. The seed depends on the prompt and on `repeat`.
    """
    seed = None if ours.seed is None else _seed(ours.seed, repeat, prompt)
    return vllm.SamplingParams(
        max_tokens=min(asked.max_tokens or ours.max_tokens, ours.max_tokens),  # a program may ask for less
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.most_kept,
        min_p=ours.min_p,
        stop=[*(asked.stop or ()), *ours.stop],
        stop_token_ids=[*(asked.stop_token_ids or ()), *ours.stop_token_ids],
        ignore_eos=ours.ignore_eos,
        seed=seed,
        logprobs=asked.logprobs or 0,  # 0: the sampled token alone
        skip_special_tokens=asked.skip_special_tokens,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        structured_outputs=asked.structured_outputs if constrained else None,
        output_kind=asked.output_kind,  # streams give what is new, others the whole so far
    )


def _seed(seed: int, repeat: int, prompt: Sequence[int]) -> int:
    """A seed that depends on the session's and on the prompt alone, and not on the order of parallel requests."""
    key = f"{seed}/{repeat}/".encode() + np.array(prompt, dtype=np.int32).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 2  # 62 bits: a positive int64


def limit_tokens(request: Any, most: int) -> None:
    """Sets how many tokens a request samples: at most `most`, also where it leaves that out.

    vLLM refuses more than the context, which programs do not know, and fills in what generation_config.json says.
    """
    fields = type(request).model_fields  # each dialect has its own; chat completions have two, the first goes before
    names = [name for name in ("max_completion_tokens", "max_output_tokens", "max_tokens") if name in fields]
    asked = [number for name in names if (number := getattr(request, name)) is not None]
    setattr(request, names[0], min([most, *asked[:1]]))
    if "min_tokens" in fields:
        request.min_tokens = 0  # the endpoint's sampling has none, and vLLM compares it with the limit


def check_request(request: object) -> None:
    """Raises ValueError for a request whose tokens could not be captured as one call."""
    asks = partial(getattr, request)
    refused = {
        "n": (asks("n", None) or 1, 1, "send as many requests"),
        "use_beam_search": (asks("use_beam_search", False), False, "sample with several requests"),
        "continue_final_message": (asks("continue_final_message", False), False, "end with a user's message"),
        "add_generation_prompt": (asks("add_generation_prompt", True), True, "leave it out"),
        "echo": (asks("echo", False), False, "read the prompt from the request"),
        "previous_response_id": (asks("previous_response_id", None), None, "send the whole input"),
        "conversation": (asks("conversation", None), None, "send the whole input"),
        "background": (bool(asks("background", False)), False, "wait for the answer, or stream it"),
    }
    # values that mean the same as leaving the field out are accepted
    for name, (value, accepted, instead) in refused.items():
        if value != accepted:
            raise ValueError(f"{name} is {value!r}, which an agent's endpoint does not take; {instead}")


def check_tools(request: object) -> None:
    """Raises ValueError for tools that no program runs."""
    for tool in getattr(request, "tools", None) or ():
        if tool.type != "function":
            raise ValueError(f"tools has one of type {tool.type!r}; only 'function' is taken, for programs that run it")


def whole_parts(body: object) -> Any:
    """A request whose messages vLLM shows whole. Raises ValueError, naming the part, for what it would leave out.

    Of an answer in several parts, vLLM shows the first in Responses, and fails at a refusal; here they are one text.
    """
    fields = body if isinstance(body, dict) else {}
    _check_parts(fields.get("system"))
    for name in ("messages", "input"):
        items = fields.get(name)
        for item in items if isinstance(items, list) else ():
            if not isinstance(item, dict) or item.get("type") == "reasoning":
                continue
            if name == "input" and (kind := item.get("type", "message")) not in _ITEMS:
                raise ValueError(f"input has an item of type {kind!r}; this endpoint takes {', '.join(_ITEMS)}")
            content = item.get("content")
            _check_parts(content)
            _check_parts(item.get("output"))
            if name == "input" and item.get("role") == "assistant" and isinstance(content, list) and content:
                text = "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
                item["content"] = [{"annotations": [], **content[0], "type": "output_text", "text": text}]
    return body


def _check_parts(content: object) -> None:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind == "tool_result":
            _check_parts(part.get("content"))
        elif kind not in _PARTS:
            raise ValueError(f"a message has a part of type {kind!r}; this endpoint takes text only")


def wants_form(request: object) -> bool:
    """Whether the program wants an answer of a certain form, so that vLLM forbids other tokens."""
    chosen = getattr(request, "tool_choice", None)
    # chat completions and Responses name the field differently
    form = getattr(request, "response_format", None) or getattr(getattr(request, "text", None), "format", None)
    free = chosen in (None, "auto", "none") and (form is None or form.type == "text")
    return not free or getattr(request, "structured_outputs", None) is not None
