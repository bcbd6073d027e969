"""On-policy distillation: the student samples, and the teacher says of every token how probable it finds it.

Legend: N scored tokens of one datum; q the student's log-prob when it sampled a token, f the teacher's.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rl.advantages.gae import gae
from rl.advantages.kl import at_scored, kl_estimates, sampled_logprobs, to_positions
from rl.data.supervised import text_to_datum
from rl.protocols import Generator, Problem, Trainer
from rl.rollouts.episodes import with_inputs
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.types import Datum, SamplingParams


def reverse_kl_advantages(
    batch: Sequence[Datum], teacher: Sequence[NDArray[np.float32]], *, discount: float = 0.0
) -> list[Datum]:
    """The batch with advantage_t = sum over s >= t of discount^(s - t) (f_s - q_s): the reverse KL, token by token.

    Less their mean over the batch, a baseline: what all tokens have in common says nothing of any and is only noise.
    Its policy gradient lessens KL(student || teacher). With discount 0 each token answers for its own divergence only:
    https://thinkingmachines.ai/blog/on-policy-distillation, the low-variance end; with 1 for all that follows, the
    whole sequence's gradient: eq. 3 of MiniLLM, https://arxiv.org/abs/2306.08543. `teacher` has one [T] per datum.
    """
    pairs = zip(sampled_logprobs(batch), at_scored(batch, teacher), strict=True)
    rewards = [-kl_estimates(q, f, "k1") for q, f in pairs]
    sums = [gae(of_tokens, np.zeros(len(of_tokens)), gamma=discount, gae_lambda=1.0)[0] for of_tokens in rewards]
    baseline = np.concatenate(sums).mean()
    advantages = [to_positions(datum, of_tokens - baseline) for datum, of_tokens in zip(batch, sums, strict=True)]
    return with_inputs(batch, advantages=advantages)


async def eval_kl(
    student: Generator, teacher: Trainer, renderer: Renderer, problems: Sequence[Problem], sampling: SamplingParams
) -> Measurement:
    """Per problem the KL(student || teacher) per token, by k3, of one answer that the student samples.

    `sampling` is of the whole distribution and has a seed, so that two measurements differ by the student alone as far
    as sampling allows.
    """

    async def answer(index: int, problem: Problem) -> Datum:
        prompt = renderer.encode(problem.prompt)
        seeded = replace(sampling, seed=(sampling.seed or 0) + index)
        (completion,) = await student.generate(prompt, seeded, 1)
        datum = text_to_datum(prompt, completion.tokens, "completion")
        return with_inputs([datum], logprobs=[to_positions(datum, np.array(completion.logprobs))])[0]

    batch = await asyncio.gather(*(answer(index, problem) for index, problem in enumerate(problems)))
    of_teacher = at_scored(batch, (await teacher.forward(batch)).logprobs)
    pairs = zip(sampled_logprobs(batch), of_teacher, strict=True)
    return Measurement(values=np.array([kl_estimates(q, f, "k3").mean() for q, f in pairs]))
