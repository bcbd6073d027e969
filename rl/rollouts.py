"""From problems to scored groups, and from groups to what the trainer learns from.

Single-turn: one prompt, one completion, one reward. All prompts of a step are in flight at once; the generator batches
them.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.protocols import Generator, Problem
from rl.rendering import Renderer, prompt_text
from rl.types import Completion, Datum, Group, Rollout, SamplingParams

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


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
    """Rewards every completion of a problem. Raises ValueError for a reward that is not a finite number (float32)."""
    problem = samples.problem
    rollouts: list[Rollout] = []
    for completion in samples.completions:
        reward = problem.reward(completion.text)
        if not _is_finite_float32(reward):
            raise ValueError(f"the reward of problem {problem.id!r} is {reward!r}; it must be a finite number")
        rollouts.append(Rollout(prompt_tokens=samples.prompt_tokens, completion=completion, reward=float(reward)))
    return Group(problem_id=problem.id, prompt=prompt_text(problem.prompt), rollouts=tuple(rollouts))


def _is_finite_float32(reward: Any) -> bool:
    """Whether it is a number, and one that is still finite where it is computed with."""
    try:
        return math.isfinite(reward) and abs(float(reward)) <= _MAX_FLOAT32
    except (TypeError, ValueError, OverflowError):  # not a number; an array; an integer beyond any float
        return False


def group_to_data(
    group: Group,
    advantage: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    keep: Callable[[Rollout], bool] = lambda _rollout: True,
) -> list[Datum]:
    """One Datum per rollout that `keep` keeps; every rollout counts in the advantages of the others.

    Rollouts without a sampled token are left out, and so is a group whose advantages are all 0: they have no gradient.
    """
    advantages = advantage(group.rewards)
    if not advantages.any():
        return []
    return [
        rollout_to_datum(rollout, a)
        for rollout, a in zip(group.rollouts, advantages, strict=True)
        if rollout.completion.tokens and keep(rollout)
    ]


def rollout_to_datum(rollout: Rollout, advantage: float | NDArray[np.floating]) -> Datum:
    """The sequence prompt + completion, shifted by one; the completion's tokens carry the weight and the advantage.

    `advantage` is the completion's, or one for each of its tokens [N]. Legend: P prompt tokens, at least 1; N
    completion tokens; T = P + N - 1, and the last N positions are scored. Without a completion nothing is, and T = P.
    Raises ValueError for a prompt without tokens and for advantages of another length.
    """
    prompt, completion = rollout.prompt_tokens, rollout.completion
    if not prompt:
        raise ValueError("the rollout's prompt has no tokens; a first token has nothing to be predicted from")
    if np.shape(advantage) not in ((), (len(completion.tokens),)):
        raise ValueError(
            f"advantage has shape {np.shape(advantage)}; it must be one number, or one for each of the completion's "
            f"{len(completion.tokens)} tokens"
        )
    # What stands after a prompt that nothing follows is never scored.
    sequence = np.array((*prompt, *(completion.tokens or prompt[-1:])), dtype=np.int64)
    num_tokens = len(sequence) - 1
    scored = np.arange(num_tokens) >= num_tokens - len(completion.tokens)
    logprobs, advantages = np.zeros((2, num_tokens), dtype=np.float32)
    logprobs[scored] = completion.logprobs
    advantages[scored] = advantage
    return Datum(
        tokens=sequence[:-1],
        loss_inputs={
            "target_tokens": sequence[1:],
            "weights": scored.astype(np.float32),
            "logprobs": logprobs,
            "advantages": advantages,
        },
    )


def with_inputs(batch: Sequence[Datum], **inputs: Sequence[NDArray[Any]]) -> list[Datum]:
    """The batch with more loss inputs, each a sequence of one [T] per datum.

    batch = with_inputs(batch, reference_logprobs=(await reference.forward(batch)).logprobs)

    Raises ValueError for an input that does not have one array per datum.
    """
    for name, arrays in inputs.items():
        if len(arrays) != len(batch):
            raise ValueError(f"{name} has {len(arrays)} arrays; the batch has {len(batch)} datums")
    return [
        replace(datum, loss_inputs={**datum.loss_inputs, **{name: arrays[i] for name, arrays in inputs.items()}})
        for i, datum in enumerate(batch)
    ]
