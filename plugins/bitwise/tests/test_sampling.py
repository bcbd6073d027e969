"""A cut keeps the same tokens of a row whatever other rows there are, with ties by number, and as NumPy computes it."""

import numpy as np
import pytest
import torch

from ownloop_bitwise import sampling

pytestmark = pytest.mark.vllm

NUM_TOKENS = 3000


def _rows(num_rows: int) -> torch.Tensor:
    """Logits as bfloat16 has them, with many ties."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_rows, NUM_TOKENS, generator=generator) * 3).bfloat16().float()


def _kept(logits: torch.Tensor, k: int, p: float) -> tuple[list[int], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The kept tokens, rising, and their log-probs, in float64."""
    row = logits.double().numpy()
    order = np.argsort(-row, kind="stable")[:k]
    probs = np.exp(row[order] - row[order[0]])
    before = np.cumsum(probs) - probs
    kept = np.sort(order[before < p * probs.sum()])
    weights = row[kept] - row[order[0]]
    return kept.tolist(), weights - np.log(np.exp(weights).sum())


def test_a_cut_is_that_of_numpy_alone_and_among_others() -> None:
    logits = _rows(12)
    cuts = [(1, 1.0), (7, 1.0), (40, 0.9), (NUM_TOKENS, 0.5), (NUM_TOKENS, 0.95), (300, 0.999)] * 2
    k, p = torch.tensor([each for each, _ in cuts]), torch.tensor([each for _, each in cuts])
    ids, logprobs = sampling.cut(logits.clone(), k, p)
    for row, (most, share) in enumerate(cuts):
        kept = logprobs[row] > -torch.inf
        order = ids[row][kept].argsort()
        expected, of_kept = _kept(logits[row], most, share)
        assert ids[row][kept][order].tolist() == expected
        np.testing.assert_allclose(logprobs[row][kept][order].numpy(), of_kept, atol=2e-6)
        own_ids, own = sampling.cut(logits[row : row + 1].clone(), k[row : row + 1], p[row : row + 1])
        is_own = own[0] > -torch.inf
        assert own_ids[0][is_own].tolist() == ids[row][kept].tolist()
        assert own[0][is_own].numpy().tobytes() == logprobs[row][kept].numpy().tobytes()


def test_tokens_of_probability_0_are_not_kept() -> None:
    logits = torch.full((1, NUM_TOKENS), -torch.inf)
    logits[0, [5, 900, 17]] = torch.tensor([1.0, 2.0, 2.0])
    ids, logprobs = sampling.cut(logits, torch.tensor([50]), torch.tensor([0.999]))
    assert ids[0][logprobs[0] > -torch.inf].tolist() == [17, 900, 5]
