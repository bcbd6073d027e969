"""Requests in OpenAI's form, on their way to a generator. This module imports no vLLM: the controller imports it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from rl.lora import Policy

OpenAIKind = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """One request."""

    kind: OpenAIKind
    """Whose request it is: `/chat/completions` or `/completions`."""
    body: bytes
    """The JSON that the client sent. What its `model` says does not count here."""
    policy: Policy
    """What to sample from."""
    model: str
    """What answers call the model."""
    tool_parser: str = ""
    """The name of vLLM's parser that finds tool calls in the text; empty for none."""
    reasoning_parser: str = ""
    """The name of vLLM's parser that tells reasoning from the answer; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIReply:
    """The answer to a request."""

    status: int
    """As of HTTP."""
    body: str | AsyncGenerator[str]
    """JSON; or, if the client asked for a stream, the events of `text/event-stream` as they come."""
