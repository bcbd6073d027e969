"""From problems to scored groups, and from groups to what the trainer learns from.

Single-turn: one prompt, one completion, one reward. All prompts of a step are in flight at once; the generator batches
them.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl.protocols import Generator, Problem
from rl.rendering import Renderer, prompt_text
from rl.types import Completion, Datum, Group, Rollout, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The completions of one problem, not scored yet."""

    problem: Problem
    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]


async def sample(
    generator: Generator,
    renderer: Renderer,
    problems: Sequence[Problem],
    sampling: SamplingParams,
    num_samples: int,
) -> list[Samples]:
    """Samples `num_samples` completions of each problem, all at once. The first failure ends the others and is raised.

    With a seed in `sampling`, problem i uses the seeds from seed + i * num_samples on: no two completions share one.
    """

    async def one(index: int, problem: Problem) -> Samples:
        prompt_tokens = renderer.encode(problem.prompt)
        seed = None if sampling.seed is None else sampling.seed + index * num_samples
        completions = await generator.generate(prompt_tokens, replace(sampling, seed=seed), num_samples)
        return Samples(problem=problem, prompt_tokens=prompt_tokens, completions=tuple(completions))

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(index, problem)) for index, problem in enumerate(problems)]
    return [task.result() for task in started]


def step_seed(seed: int, step: int) -> int:
    """The sampling seed of a step of a run: far enough apart for 2^20 completions a step."""
    return (seed << 40) + (step << 20)


def score(samples: Samples) -> Group:
    """Rewards every completion of a problem. Raises ValueError for a reward that is not a finite number."""
    problem = samples.problem
    rollouts: list[Rollout] = []
    for completion in samples.completions:
        reward = problem.reward(completion.text)
        if not math.isfinite(reward):
            raise ValueError(f"the reward of problem {problem.id!r} is {reward}; it must be a finite number")
        rollouts.append(Rollout(prompt_tokens=samples.prompt_tokens, completion=completion, reward=float(reward)))
    return Group(problem_id=problem.id, prompt=prompt_text(problem.prompt), rollouts=tuple(rollouts))


def group_to_data(group: Group, advantage: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> list[Datum]:
    """One Datum per rollout; none when every advantage of the group is 0, because such a group has no gradient."""
    advantages = advantage(group.rewards)
    if not advantages.any():
        return []
    return [rollout_to_datum(rollout, a) for rollout, a in zip(group.rollouts, advantages, strict=True)]


def rollout_to_datum(rollout: Rollout, advantage: float) -> Datum:
    """The sequence prompt + completion, shifted by one; the completion's tokens carry the weight and the advantage.

    Legend: P prompt tokens, N completion tokens; T = P + N - 1, and the last N positions are scored.
    """
    prompt, completion = rollout.prompt_tokens, rollout.completion
    sequence = np.array(prompt + completion.tokens, dtype=np.int64)
    scored = np.arange(len(sequence) - 1) >= len(prompt) - 1
    logprobs = np.zeros(len(scored), dtype=np.float32)
    logprobs[scored] = completion.logprobs
    return Datum(
        tokens=sequence[:-1],
        loss_inputs={
            "target_tokens": sequence[1:],
            "weights": scored.astype(np.float32),
            "logprobs": logprobs,
            "advantages": (scored * advantage).astype(np.float32),
        },
    )
