"""On-policy distillation: the student samples, and the teacher's log-probs of the sampled tokens become advantages.

Legend: N scored tokens of one datum; q the student's log-prob when it sampled a token, f the teacher's.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rl.advantages import gae, gather_scored, kl_estimates, sampled_logprobs, scatter_scored
from rl.data.sources import text_to_datum
from rl.protocols import Generator, Problem, Trainer
from rl.rollouts.episodes import with_inputs
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.sampling import KeptSets
from rl.types import Datum, SamplingParams


def reverse_kl_advantages(
    batch: Sequence[Datum], teacher: Sequence[NDArray[np.float32]], *, discount: float = 0.0
) -> list[Datum]:
    """Adds `advantages` to the batch: advantage_t = sum over s >= t of discount^(s - t) (f_s - q_s), minus a baseline.

    The policy gradient with these advantages reduces KL(student || teacher). The baseline is the mean over all tokens
    of the batch; it reduces the variance. `teacher` holds the teacher's log-probs, one [T] per datum.

    With discount 0 a token is credited with its own divergence only: biased, but of low variance
    (https://thinkingmachines.ai/blog/on-policy-distillation). With discount 1 it is credited with that of all later
    tokens, which is the unbiased gradient of the sequence's KL: eq. 3 of MiniLLM, https://arxiv.org/abs/2306.08543.
    """
    pairs = zip(sampled_logprobs(batch), gather_scored(batch, teacher), strict=True)
    rewards = [-kl_estimates(q, f, "k1") for q, f in pairs]
    # With values of 0 and lambda 1, GAE's advantages are discounted sums of rewards.
    sums = [gae(reward, np.zeros(len(reward)), gamma=discount, gae_lambda=1.0)[0] for reward in rewards]
    baseline = np.concatenate(sums).mean()
    advantages = [scatter_scored(datum, values - baseline) for datum, values in zip(batch, sums, strict=True)]
    return with_inputs(batch, advantages=advantages)


async def eval_kl(
    student: Generator, teacher: Trainer, renderer: Renderer, problems: Sequence[Problem], sampling: SamplingParams
) -> Measurement:
    """KL(student || teacher) per token, estimated by k3 for each problem from one answer that the student samples.

    Both sides are scored under the distribution that was sampled from: where it is cut, so is the teacher's. `sampling`
    should have a seed: two measurements with the same seed differ, as far as sampling allows, only because the student
    changed.
    """

    async def answer(index: int, problem: Problem) -> Datum:
        prompt = renderer.encode_problem(problem)
        seeded = replace(sampling, seed=(sampling.seed or 0) + index)  # another seed for every problem
        (completion,) = await student.generate(prompt, seeded, 1)
        datum = text_to_datum(prompt, completion.tokens, "completion")
        kept = None if completion.kept is None else KeptSets.joined([KeptSets.whole(len(prompt) - 1), completion.kept])
        datum = replace(datum, temperature=completion.temperature, kept=kept)
        return with_inputs([datum], logprobs=[scatter_scored(datum, np.array(completion.logprobs))])[0]

    batch = await asyncio.gather(*(answer(index, problem) for index, problem in enumerate(problems)))
    teacher_logprobs = gather_scored(batch, (await teacher.forward(batch)).logprobs)
    pairs = zip(sampled_logprobs(batch), teacher_logprobs, strict=True)
    return Measurement(values=np.array([kl_estimates(q, f, "k3").mean() for q, f in pairs]))
