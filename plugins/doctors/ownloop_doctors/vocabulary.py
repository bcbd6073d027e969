"""The whole distributions of a trainer and a generator at some positions: not only the log-prob of a sampled token.

A generator returns the log-probs of the whole vocabulary. A trainer scores target tokens only, so each token is scored
among a kept set of itself and the generator's most probable token. That gives the token's log-odds, with products of
two rows of the vocabulary for a token and a position, and the log-probs of the whole vocabulary follow from them. So no
engine has to return [positions, vocabulary], and every engine that knows kept sets can be compared."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl.images import TokensWithImages, images_of
from rl.protocols import Generator, Trainer
from rl.rollouts.tokenizer import load_tokenizer
from rl.sampling import KeptSets
from rl.types import Datum, SamplingParams

_MAX_TOKENS = 24  # a generator returns all tokens at every position of a sequence, a tuple for each
_NUM_POSITIONS = 4
_TOKENS_OF_A_CALL = 4096
_NUM_DIFFERENCES = 3
_LARGEST = -1e-12
"""The log-prob of a token that is all but certain. That of a certain one, 0, stands for odds beyond float32."""

Distributions = NDArray[np.float64]
"""[positions, vocabulary] log-probs."""


async def compare_vocabulary(train: Trainer, generate: Generator, tokens: Sequence[int]) -> str:
    """Compares the distributions at the last positions of a sequence's beginning, in two sentences."""
    p, q = await distributions(train, generate, tokens[:_MAX_TOKENS])
    divergence = (np.exp(q) * (q - p)).sum(1)
    moved = np.abs(np.exp(p) - np.exp(q))
    top = [np.unravel_index(index, moved.shape) for index in moved.argsort(axis=None)[: -1 - _NUM_DIFFERENCES : -1]]
    largest = ", ".join(f"token {at[1]} ({np.exp(p[at]):.4f}, {np.exp(q[at]):.4f})" for at in top)
    return (
        f"All {p.shape[1]} tokens at {len(p)} positions: the KL divergence of the trainer's distribution from the "
        f"generator's is {divergence.mean():.2e}, at most {divergence.max():.2e}. Their probabilities differ most for "
        f"{largest}."
    )


async def distributions(
    train: Trainer, generate: Generator, tokens: Sequence[int]
) -> tuple[Distributions, Distributions]:
    """The trainer's and the generator's log-probs of the whole vocabulary at the last positions of a sequence.

    The generator's option `max_logprobs` of vLLM has to be -1, or the request raises ValueError.
    """
    (scored,) = await generate.generate(tokens, SamplingParams(max_tokens=1, topk_prompt_logprobs=-1))
    assert scored.topk_prompt_logprobs is not None
    rows = [dict(row) for row in scored.topk_prompt_logprobs[-_NUM_POSITIONS:]]
    q = np.array([[row[token] for token in range(len(row))] for row in rows])
    vocabulary, best = np.arange(q.shape[1]), q.argmax(1)
    found: list[NDArray[np.float64]] = []
    for chunk in np.split(vocabulary, range(_TOKENS_OF_A_CALL, len(vocabulary), _TOKENS_OF_A_CALL)):
        output = await train.forward([_datum(np.array(tokens), int(token), best) for token in chunk])
        found += [logprobs[-len(best) :].astype(np.float64) for logprobs in output.logprobs]
    of_two = np.minimum(np.stack(found, axis=1), _LARGEST)
    odds = of_two - np.log(-np.expm1(of_two))
    odds[np.arange(len(best)), best] = 0.0
    return _normalized(odds), _normalized(q)  # a softmax in float32 is off by more than the KL of two that agree


def _normalized(logits: Distributions) -> Distributions:
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def _datum(tokens: NDArray[np.int64], token: int, best: NDArray[np.int64]) -> Datum:
    """A datum that scores `token` at the last positions, each among itself and the most probable token [positions]."""
    size, since = len(tokens) - 1, len(tokens) - 1 - len(best)
    inputs = {"target_tokens": np.full(size, token), "weights": (np.arange(size) >= since).astype(np.float32)}
    kept = KeptSets.of([*[()] * since, *(sorted({token, int(other)}) for other in best)])
    return Datum(tokens=tokens[:-1], loss_inputs=inputs, kept=kept)


def split_after_images(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens up to the end of their last image, or their first token if there is none, and the text that follows."""
    images = images_of(tokens)
    end = images[-1].start + images[-1].num_tokens if images else 1
    return TokensWithImages(tokens[:end], images), tokens[end:]


def compare_tokenizers(trainer_model: Path, generator_model: Path) -> list[str]:
    """One sentence if the tokenizers of the two directories differ, else none."""
    vocabularies = [load_tokenizer(model).get_vocab() for model in (trainer_model, generator_model)]
    if vocabularies[0] == vocabularies[1]:
        return []
    differing = len({index for _, index in vocabularies[0].items() ^ vocabularies[1].items()})
    return [f"The tokenizers of {trainer_model} and {generator_model} read {differing} tokens differently."]
