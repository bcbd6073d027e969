"""Fakes that satisfy the protocols, for tests without a generator or trainer process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rl.lora import LivePolicy, Policy
from rl.protocols import Problem
from rl.types import Completion, FinishReason, PullMode, Rollout, SamplingParams, Turn


class WordRenderer:
    """A renderer for rollouts that encodes a word as one token, its length."""

    def __init__(self, max_model_len: int | None = None) -> None:
        self.max_model_len = max_model_len

    def encode(self, prompt: object) -> tuple[int, ...]:
        """One token per word."""
        return tuple(len(word) for word in str(prompt).split())

    def encode_problem(self, problem: Problem) -> tuple[int, ...]:
        """One token per word of the prompt."""
        return self.encode(problem.prompt)

    def opening(self, tokens: Sequence[int]) -> str:
        """A prompt opens no reasoning."""
        del tokens
        return ""

    def encode_reply(self, reply: object, answer_tokens: Sequence[int], earlier: object = ()) -> tuple[int, ...]:
        """One token per word."""
        del answer_tokens, earlier
        return self.encode(reply)


class ScriptedGenerator:
    """Answers with `answer(prompt_tokens, sample, seed)`, one token per character. Calls finish out of order."""

    def __init__(
        self, answer: Callable[[tuple[int, ...], int, int | None], str], finish_reason: FinishReason = "stop"
    ) -> None:
        """`answer` returns the text of a completion."""
        self._answer = answer
        self._finish_reason: FinishReason = finish_reason
        self.calls: list[tuple[tuple[int, ...], SamplingParams, int]] = []

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        prompt = tuple(prompt_tokens)
        self.calls.append((prompt, sampling, num_samples))
        for _ in range(10 * (5 - len(self.calls) % 5)):
            await asyncio.sleep(0)
        said = [completion(self._answer(prompt, i, sampling.seed)) for i in range(num_samples)]
        return [replace(each, finish_reason=self._finish_reason) for each in said]

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Does nothing."""

    async def drop_policy(self, policy: Policy) -> None:
        """Does nothing."""


def completion(text: str, version: int = 0) -> Completion:
    """A completion whose tokens are the characters of its text, each with log-prob -1."""
    tokens = tuple(map(ord, text))
    return Completion(
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        versions=(version,) * len(tokens),
        text=text,
        finish_reason="stop",
    )


def single_turn(
    prompt_tokens: tuple[int, ...], answer: Completion, reward: float, metrics: Mapping[str, float] | None = None
) -> Rollout:
    """A rollout of one turn."""
    turn = Turn(prompt_tokens=prompt_tokens, completion=answer)
    return Rollout(turns=(turn,), reward=reward, metrics=metrics or {})
