"""Supervised training data: datums from given texts, and the loss on held-out ones."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from rl.advantages.kl import gather_scored
from rl.checks import check_known
from rl.data.sources import Example
from rl.protocols import Trainer
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.system.timeline import report_progress
from rl.types import Datum

TrainOn = Literal["completion", "all"]


def text_to_datum(prompt_tokens: Sequence[int], completion_tokens: Sequence[int], train_on: TrainOn) -> Datum:
    """The sequence prompt + completion, shifted by one, with weight 1 on the positions to learn and 0 elsewhere.

    Legend: P prompt tokens, N completion tokens, T = P + N - 1. `train_on` "completion" scores the last N positions,
    "all" scores all. Raises ValueError for an empty prompt: nothing would predict the first token of the completion.
    """
    if len(prompt_tokens) == 0:
        raise ValueError("the prompt has no tokens; a first token has nothing to be predicted from")
    sequence = np.array([*prompt_tokens, *completion_tokens], dtype=np.int64)
    num_tokens = len(sequence) - 1
    scored = np.arange(num_tokens) >= (len(prompt_tokens) - 1 if train_on == "completion" else 0)
    return Datum(
        tokens=sequence[:-1], loss_inputs={"target_tokens": sequence[1:], "weights": scored.astype(np.float32)}
    )


def examples_to_data(
    renderer: Renderer, examples: Sequence[Example], *, train_on: TrainOn, max_tokens: int
) -> list[Datum]:
    """One datum per example, in order. Examples of more than `max_tokens` tokens are left out, not truncated.

    Raises ValueError for an unknown `train_on`.
    """
    check_known("train_on", train_on, get_args(TrainOn))
    encoded = [
        (renderer.encode(example.prompt), renderer.encode_completion(example.prompt, example.completion))
        for example in examples
    ]
    return [
        text_to_datum(prompt, completion, train_on)
        for prompt, completion in encoded
        if len(prompt) + len(completion) <= max_tokens
    ]


async def eval_loss(trainer: Trainer, batch: Sequence[Datum]) -> Measurement:
    """Cross-entropy per token of each datum, weighted by its number of tokens that count, each as 1."""
    report_progress("evaluating", 0, len(batch))
    output = await trainer.forward(batch)
    report_progress("evaluating", len(batch), len(batch))
    num_tokens = np.array([datum.num_loss_tokens for datum in batch], dtype=np.float64)
    sums = [float(logprobs.sum(dtype=np.float64)) for logprobs in gather_scored(batch, output.logprobs)]
    return Measurement(values=-np.array(sums) / num_tokens, weights=num_tokens)
