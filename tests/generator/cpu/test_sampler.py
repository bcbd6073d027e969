"""Sampling on the CPU against NumPy in float64, and cuts and kept sets against vLLM's own."""

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from generator.cpu.sampler import patch_sampling, sample

pytestmark = pytest.mark.vllm

VOCABULARIES = (1, 5, 127, 128, 129, 1000, 49152)
LARGEST = 1 - 2.0**-53
"""The largest number that a generator of float64 returns."""


def cumulative(logprobs: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[V] float64"""
    return np.exp(logprobs.numpy().astype(np.float64)).cumsum()


@pytest.mark.parametrize("num_words", VOCABULARIES)
def test_a_number_leads_to_the_word_in_whose_interval_it_lies(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    logprobs = (3 * torch.randn(num_words, generator=generator)).log_softmax(-1)
    up_to = cumulative(logprobs)
    sizes = np.diff(up_to, prepend=0.0)
    words = np.flatnonzero(sizes > 1e-6)  # smaller ones are moved by the rounding of the sums
    words = words[:: 1 + len(words) // 1000]
    middles = torch.from_numpy((up_to - sizes / 2)[words] / up_to[-1])
    assert sample(logprobs.expand(len(words), -1), middles).tolist() == words.tolist()


def test_words_of_probability_0_are_never_sampled() -> None:
    for num_words in (3, 128, 300, 1024):
        for allowed in ([0], [num_words - 1], [1, num_words // 2]):
            logits = torch.full((num_words,), -torch.inf)
            logits[allowed] = torch.randn(len(allowed))
            uniform = torch.tensor([0.0, 1e-300, 0.5, LARGEST], dtype=torch.float64)
            found = sample(logits.log_softmax(-1).expand(4, -1), uniform).tolist()
            assert set(found) <= set(allowed)
            assert (found[0], found[-1]) == (allowed[0], allowed[-1])


def test_logits_that_are_no_numbers_lead_to_some_word() -> None:
    found = sample(torch.full((2, 130), torch.nan), torch.tensor([0.0, LARGEST], dtype=torch.float64))
    assert ((found >= 0) & (found < 130)).all()


def test_many_samples_have_the_distribution_of_the_log_probs() -> None:
    logprobs = (2 * torch.randn(300, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = torch.bincount(sample(logprobs.expand(len(uniform), -1), uniform), minlength=300).numpy()
    expected = np.diff(cumulative(logprobs), prepend=0.0)
    expected *= len(uniform) / expected.sum()
    often = expected >= 5
    chi_squared = ((counts - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum()  # its mean; its variance is twice that
    assert abs(chi_squared - degrees) < 4 * np.sqrt(2 * degrees)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's sampler with the patch."""
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_cpu)
    patch_sampling()
    patch_sampling()
    return TopKTopPSampler("processed_logprobs")


def test_top_k_and_top_p_count_and_are_reported(sampler: Any) -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(64, -1)
    tokens, reported = sampler.forward(logits.clone(), {}, torch.full((64,), 2), None)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(reported[:, :2], torch.tensor([3.0, 2.0]).log_softmax(-1).expand(64, -1))
    assert (reported[:, 2:] == -torch.inf).all()
    tokens, reported = sampler.forward(logits.clone(), {}, None, torch.full((64,), 0.5))
    assert set(tokens.tolist()) == {0}
    assert (reported[:, 0] == 0).all()


def test_a_request_with_a_seed_does_not_depend_on_its_neighbours(sampler: Any) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))

    def seeded(rows: list[int]) -> list[int]:
        generators = {place: torch.Generator().manual_seed(row) for place, row in enumerate(rows)}
        return sampler.forward(logits[rows], generators, None, None)[0].tolist()

    assert seeded([0, 1, 2, 3]) == [*seeded([0]), *seeded([1]), *seeded([2, 3])]


def test_seeds_that_differ_in_any_bit_sample_differently(sampler: Any) -> None:
    logits = torch.zeros(1, 49152)

    def tokens(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(sampler.forward(logits, {0: generator}, None, None)[0]) for _ in range(3)]

    seeds = [7, *(7 + (1 << bit) for bit in (20, 31, 32, 40, 61))]
    found = [tokens(seed) for seed in seeds]
    assert len({token for each in found for token in each}) == 3 * len(seeds)
    assert tokens(7) == found[0]


def test_the_cut_is_that_of_vllm_and_its_words_are_returned(sampler: Any) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 40_000)
    logits[::4] = logits[::4].masked_fill(torch.rand(16, 40_000) < 0.5, -torch.inf)  # as min-p leaves them
    k, p = torch.tensor([20, 512, 50, 40_000]).repeat(16), torch.tensor([1.0, 0.9, 0.95, 1.0]).repeat(16)
    expected = apply_top_k_top_p(logits.clone(), k.clone(), p.clone())
    tokens, reported = sampler.forward(logits.clone(), {}, k, p)
    torch.testing.assert_close(reported, expected.log_softmax(-1))
    for row, (start, stop) in enumerate(zip(sampler.kept.offsets, sampler.kept.offsets[1:], strict=False)):
        words = expected[row].isfinite().nonzero()[:, 0].tolist() if row % 4 != 3 else []
        assert sampler.kept.token_ids[start:stop].tolist() == words
        assert tokens[row] in words or not words


def test_neighbours_that_are_cut_change_no_sample(sampler: Any) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    k, p = torch.tensor([1000, 5, 1000]), torch.tensor([1.0, 1.0, 0.5])

    def seeded(rows: list[int]) -> list[int]:
        generators = {place: torch.Generator().manual_seed(row) for place, row in enumerate(rows)}
        return sampler.forward(logits[rows], generators, k[rows], p[rows])[0].tolist()

    assert seeded([0, 1, 2]) == [*seeded([0]), *seeded([1]), *seeded([2])]
