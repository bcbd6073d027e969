"""Chunked log-probs and entropies against autograd through the whole matrix."""

from typing import Any

import pytest
import torch

from rl.sampling import KeptSets
from trainer.engines.pytorch import logprobs
from trainer.engines.pytorch.distribution import Distribution, gradient_of_rows, sums_of_rows
from trainer.engines.pytorch.logprobs import LogitsMemory
from trainer.engines.pytorch.low_rank import LowRank


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> LogitsMemory:
    """Memory of a test's own."""
    memory = LogitsMemory()
    monkeypatch.setattr(logprobs, "MEMORY", memory)
    return memory


@pytest.mark.parametrize("kept_bytes", [0, 5 * 50 * 4, 1 << 20])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * 50 * 4, 1 << 20])
@pytest.mark.parametrize("block_bytes", [1, 3 * 50 * 4, 1 << 20])
@pytest.mark.parametrize(("size", "cap"), [(0, None), (1, None), (8, None), (8, 2.0)])
def test_values_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, block_bytes: int, kept_bytes: int, size: int, cap: float | None
) -> None:
    memory = LogitsMemory(chunk_bytes=chunk_bytes, block_bytes=block_bytes, kept_bytes=kept_bytes)
    monkeypatch.setattr(logprobs, "MEMORY", memory)
    torch.manual_seed(0)
    hidden, weight = torch.randn(size, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)
    targets, temperatures = torch.randint(0, 50, (size,)), torch.rand(size) + 0.5
    scale_logprobs, scale_entropy = torch.randn(size), torch.randn(size)

    logits = hidden @ weight.T
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = torch.log_softmax(capped / temperatures[:, None], -1)
    expected_entropy = -(expected.exp() * expected).sum(-1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    ((chosen * scale_logprobs).sum() + (expected_entropy * scale_entropy).sum()).backward()
    expected_grads = hidden.grad, weight.grad
    hidden.grad = weight.grad = None

    options: dict[str, Any] = {"distribution": Distribution(1 / temperatures), "cap": cap}
    actual, entropy = logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=True, **options)
    assert entropy is not None
    torch.testing.assert_close(actual, chosen)
    torch.testing.assert_close(entropy, expected_entropy)
    ((actual * scale_logprobs).sum() + (entropy * scale_entropy).sum()).backward()
    torch.testing.assert_close(hidden.grad, expected_grads[0])
    torch.testing.assert_close(weight.grad, expected_grads[1])


@pytest.mark.parametrize("share", [0.03, 0.7])
@pytest.mark.parametrize(("whole", "cap"), [(0, None), (40, None), (40, 2.0)])
def test_scores_among_kept_words_equal_a_dense_softmax(share: float, whole: int, cap: float | None) -> None:
    """In float64, over several chunks, with sets of few words and of most, and positions that nothing was cut for."""
    torch.manual_seed(0)
    size, num_words = 600, 101
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (size, num_words))
    a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 8), (num_words, 2)))
    low_rank = LowRank(a, b, 1.5)
    targets, keeps = torch.randint(0, num_words, (size,)), torch.rand(size, num_words) < share
    keeps[torch.arange(size), targets] = True
    keeps[torch.randperm(size)[:whole]] = True
    scale = torch.rand(size, dtype=torch.float64) + 0.5
    x = hidden @ weight.T + low_rank.down(hidden) @ low_rank.b.T
    z = (x if cap is None else cap * torch.tanh(x / cap)) * scale[:, None]
    log_p = z.masked_fill(~keeps, -1e9).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    kept = KeptSets.of([[] if row.all() else row.nonzero()[:, 0].tolist() for row in keeps])
    actual = logprobs.logprobs_and_entropy(
        *(hidden, weight, targets), entropy=True, low_rank=low_rank, distribution=Distribution(scale, kept), cap=cap
    )
    upstream = torch.randn(2, size, dtype=torch.float64)
    grads: list[tuple[torch.Tensor, ...]] = []
    for scores in (expected, actual):
        both = torch.stack([part for part in scores if part is not None])
        grads.append((both, *torch.autograd.grad((both * upstream).sum(), (hidden, weight, a, b))))
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("memory_gb", "positions", "chunks"), [(16, 16384, 38), (80, 16384, 8), (141, 16384, 5)])
def test_gpu_logic_chunks_grow_with_the_memory_of_the_gpu(memory_gb: int, positions: int, chunks: int) -> None:
    """128 MiB were 75 chunks for this vocabulary, each of which reads and writes the projection's whole gradient."""
    limit = logprobs.chunk_bytes_on_gpu(memory_gb << 30)
    parts = logprobs._chunks(positions, 151936, limit)  # pyright: ignore[reportPrivateUsage]
    assert len(parts) == chunks
    assert max(part.stop - part.start for part in parts) * 151936 * 4 <= limit
    assert logprobs.chunk_bytes_on_gpu(1 << 30) == 128 << 20


def test_large_logits_are_scored_and_have_their_gradients() -> None:
    """Logits of hundreds overflow `exp`, and make the answer as good as certain."""
    torch.manual_seed(0)
    hidden, weight = 20 * torch.randn(16, 6, requires_grad=True), 20 * torch.randn(50, 6)
    targets = (hidden @ weight.T).argmax(-1)
    targets[::2] = 0
    logits = hidden.double() @ weight.double().T
    log_p = torch.log_softmax(logits, -1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    actual = logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=True)
    assert logits.amax() > 200
    for one, other in zip(actual, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-4)
        (grad,) = torch.autograd.grad(one.sum(), hidden, retain_graph=True)
        (expected_grad,) = torch.autograd.grad(other.sum(), hidden, retain_graph=True)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-3)


def test_entropy_alone_has_its_gradient() -> None:
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(50, 6)
    expected = torch.log_softmax(hidden @ weight.T, -1)
    (expected_grad,) = torch.autograd.grad(-(expected.exp() * expected).sum(), hidden)
    _, entropy = logprobs.logprobs_and_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), entropy=True)
    assert entropy is not None
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    torch.testing.assert_close(grad, expected_grad)


def test_logprobs_of_bfloat16_weights_are_float32_and_normalised() -> None:
    hidden, weight = torch.randn(3, 6).bfloat16(), torch.randn(50, 6).bfloat16()
    every = [logprobs.logprobs_and_entropy(hidden, weight, torch.full((3,), v), entropy=False)[0] for v in range(50)]
    assert every[0].dtype == torch.float32
    torch.testing.assert_close(torch.stack(every).exp().sum(0), torch.ones(3))


@pytest.mark.parametrize("kept", [None, KeptSets.of([[0, 7], [], [2, 3, 49]])])
def test_a_widened_product_rounds_nothing_but_the_gradients(kept: KeptSets | None) -> None:
    torch.manual_seed(0)
    hidden, weight = (4 * torch.randn(n, 64).bfloat16() for n in (3, 50))
    hidden.requires_grad_()
    weight.requires_grad_()
    targets = torch.tensor([7, 4, 49])
    wide, exact = (
        logprobs.logprobs_and_entropy(*tensors, targets, entropy=False, distribution=Distribution(None, kept, widened))[
            0
        ]
        for tensors, widened in (((hidden, weight), True), ((hidden.double(), weight.double()), False))
    )
    torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=1e-4)
    upstream = torch.tensor([1.0, -0.5, 2.0])
    ours, theirs = (torch.autograd.grad((s * upstream).sum(), (hidden, weight)) for s in (wide, exact))
    for grad, expected in zip(ours, theirs, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("memory")
def test_rows_whose_logits_were_overwritten_have_their_gradients(dtype: torch.dtype) -> None:
    """Rows of a pipeline are scored before the first one's backward pass. Backward passes change no logits either."""
    torch.manual_seed(0)
    weight = torch.randn(50, 6, dtype=dtype)
    rows = [torch.randn(size, 6, dtype=dtype, requires_grad=True) for size in (4, 8, 2)]

    def scored(hidden: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(len(hidden))
        return logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=False)[0].sum()

    expected = [torch.autograd.grad(scored(hidden), hidden)[0] for hidden in rows]
    scores = [scored(hidden) for hidden in rows]
    for _ in range(2):
        actual = [torch.autograd.grad(s, hidden, retain_graph=True)[0] for s, hidden in zip(scores, rows, strict=True)]
        assert all(map(torch.equal, actual, expected))


def test_what_has_no_gradient_keeps_no_logits(memory: LogitsMemory) -> None:
    hidden, weight, targets = torch.randn(4, 6), torch.randn(50, 6), torch.arange(4)
    logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=False)
    assert not len(memory._kept)  # pyright: ignore[reportPrivateUsage]
    hidden.requires_grad_()
    with torch.no_grad():
        logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=False)
    assert not len(memory._kept)  # pyright: ignore[reportPrivateUsage]
    logprobs.logprobs_and_entropy(hidden, weight, targets, entropy=False)
    assert len(memory._kept)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("scaled", "cap"), [(False, None), (True, None), (True, 2.0)])
def test_gpu_logic_fused_functions_are_softmax_and_its_gradient(scaled: bool, cap: float | None) -> None:
    x, column = torch.randn(5, 31, requires_grad=True), torch.tensor([0, 30, 7, 7, 2])
    logits = x if cap is None else cap * torch.tanh(x / cap)
    grad_logprobs, grad_entropies = torch.randn(5), torch.randn(5)
    here = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])  # another rank of a tensor-parallel group has the third target
    scale = torch.rand(5) + 0.5 if scaled else None
    z = logits if scale is None else logits * scale[:, None]
    lse, p = z.logsumexp(-1), z.softmax(-1)
    entropies = lse - (p * z).sum(-1)
    logprobs = z.gather(1, column[:, None])[:, 0] * here - lse
    ((logprobs * grad_logprobs).sum() + (entropies * grad_entropies).sum()).backward()
    with torch.no_grad():
        log_sum, expected = sums_of_rows(logits, True, scale)
        of_entropy = (grad_entropies, entropies)
        grad = gradient_of_rows(logits, lse, grad_logprobs, column, here, of_entropy, scale, cap)
    assert expected is not None
    torch.testing.assert_close(log_sum, lse)
    torch.testing.assert_close(log_sum - expected, entropies)
    torch.testing.assert_close(grad, x.grad)
