"""The table's bodies on a GPU, real or pretended: a row has equal bits alone and among others, and is right."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from generator.config import GeneratorConfig
from generator.options import generator_env
from ownloop_bitwise import ops
from ownloop_bitwise.engine import BitwiseEngine
from ownloop_bitwise.titan import masked_attention, sequences_of
from rl.data.packing import Document
from rl.losses import get_loss
from rl.rollouts.episodes import rollout_to_datum
from rl.tiny_models import SERVABLE, random_batch, tiny_dense
from rl.types import Completion, Datum, Rollout, SamplingParams, Turn
from trainer.config import TrainerConfig
from trainer.engines import load_engine

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
PLACES = (slice(0, 1), slice(130, 131), slice(5, 40), slice(100, 150))
"""Of 150 rows. The kernels' tiles have 16 and 128."""


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _functions(dtype: torch.dtype) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Operations on rows [..., 96], and what they compute, of float64."""
    w, b, weight = torch.randn(200, 96).to(dtype), torch.randn(200).to(dtype), torch.randn(96).to(dtype)
    wide, packed = (each.double().cuda() for each in (w, b, weight)), ops.Packed.of(w.cuda())
    w64, b64, weight64 = wide
    bias, norm = b.cuda(), weight.cuda()

    def normed(x: Tensor, shift: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight64 + shift)

    return {
        "product": (lambda x: ops.product(x, packed), lambda x: x @ w64.T),
        "biased": (lambda x: ops.product(x, packed, bias), lambda x: x @ w64.T + b64),
        "norm": (lambda x: ops.rms_norm(x, norm, 1e-6), lambda x: normed(x, 0)),
        "gemma_norm": (lambda x: ops.rms_norm(x, norm, 1e-6, 1.0), lambda x: normed(x, 1)),
        "silu": (lambda x: ops.gate_mul(x, x), lambda x: torch.nn.functional.silu(x) * x),
        "cap": (lambda x: ops.soft_cap(x, 3.0), lambda x: (x / 3).tanh() * 3),
        "log_sum": (lambda x: ops.log_sum_exp_rows(x)[0], lambda x: x.logsumexp(-1)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(150, 96) * 2).to(dtype).cuda()
    for name, (function, exact) in _functions(dtype).items():
        whole, expected = function(x), exact(x.double())
        for where in PLACES:
            assert bits(function(x[where])) == bits(whole[where]), name
        bound = 40 * EPS[torch.float32 if name == "log_sum" else dtype] * float(expected.abs().max())
        assert float((whole.double() - expected).abs().max()) < bound, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_has_the_same_bits_in_a_fused_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 96).to(dtype).cuda(), torch.randn(300, 96).to(dtype).cuda()
    fused = ops.product(x, ops.Packed.of(w))
    for part in (slice(0, 64), slice(64, 300), slice(299, 300)):
        assert bits(ops.product(x, ops.Packed.of(w[part]))) == bits(fused[:, part])


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (7, 0.0), (0, 20.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_in_a_row_with_shared_prompts_and_in_pages(
    dtype: torch.dtype, window: int, cap: float
) -> None:
    """Two completions of one prompt: in one row; each straight; and as a generator asks, chunk by chunk, in pages."""
    from ownloop_bitwise.cuda import attend_pages

    torch.manual_seed(0)
    prompt, suffixes, size, scale = 19, (23, 6), 16, 0.2
    length = prompt + sum(suffixes)
    q, k, v = (torch.randn(length, heads, 32).to(dtype).cuda() for heads in (6, 2, 2))
    shared = sequences_of([Document(prompt, suffixes)]).to(q.device)
    packed = ops.attend(q, k, v, shared, scale, window, cap)
    exact = masked_attention(q[None].double(), k[None].double(), v[None].double(), shared, scale, window, cap)[0]
    error = float((packed.double() - exact).abs().max())
    assert error < 200 * EPS[dtype]

    first = prompt
    for suffix in suffixes:
        rows = torch.tensor([*range(prompt), *range(first, first + suffix)])
        first += suffix
        straight = sequences_of([Document(len(rows), ())]).to(q.device)
        expected = packed[rows]
        assert bits(ops.attend(q[rows], k[rows], v[rows], straight, scale, window, cap)) == bits(expected)
        cache = torch.zeros(9, size, 2, 64, dtype=dtype).cuda()
        pages = torch.tensor([[7, 2, 5, 1]], dtype=torch.int32).cuda()
        place = torch.arange(len(rows))
        slots = pages[0].cpu()[place // size].long() * size + place % size
        cache.flatten(0, 1)[slots.cuda()] = torch.cat([k, v], -1)[rows]
        for start, stop in ((0, 16), (16, 21), *((i, i + 1) for i in range(21, len(rows)))):
            out = q.new_empty(stop - start, 6, 32)
            starts, lengths = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([0, stop - start], [stop]))
            keys, values = cache.split(32, -1)
            attend_pages(q[rows[start:stop]], keys, values, out, starts, lengths, pages, scale, window, cap)
            assert bits(out) == bits(expected[start:stop])


def test_a_cut_has_the_same_log_sum_packed_and_padded() -> None:
    """The trainer has the kept tokens in a row, the generator those of all rows in one matrix."""
    from ownloop_bitwise.generator_gpu import token_logprobs

    torch.manual_seed(0)
    logits = torch.randn(6, 1500).cuda() * 3
    kept = torch.rand(6, 1500).cuda() < torch.tensor([0.01, 0.5, 0.9, 1.0, 0.002, 0.3]).cuda()[:, None]
    kept[:, 3] = True
    values, ends = logits[kept], kept.sum(-1).cumsum(0)
    lse, _ = ops.log_sum_exp(values, torch.cat([ends.new_zeros(1), ends[:-1]]), ends)
    found = token_logprobs(logits.masked_fill(~kept, -torch.inf), torch.full((6, 1), 3).cuda())
    assert bits(found[:, 0]) == bits(logits[:, 3] - lse)
    expected = logits.double().masked_fill(~kept, -torch.inf).log_softmax(-1)[:, 3]
    assert float((found[:, 0] - expected).abs().max()) < 1e-5


def _model(folder: Path, family: str) -> Path:
    options: dict[str, Any] = {**SERVABLE, "max_position_embeddings": 128}  # as many as padding has
    if family == "windows":
        family, options["sliding_window"] = "mistral", 21
    return tiny_dense(family, folder / family, **options)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("llama", "float32")])
def test_a_datum_has_the_same_log_probs_in_any_row_and_torchtitans_gradients(
    family: str, dtype: Any, tmp_path: Path
) -> None:
    config = TrainerConfig(model=_model(tmp_path, family), engine="bitwise", compute_dtype=dtype)
    engine, ordinary = BitwiseEngine(config), load_engine(replace(config, engine="torchtitan"))
    batch = random_batch([9, 40, 23])
    whole = [each.tobytes() for each in engine.forward([batch]).logprobs]
    assert [engine.forward([[datum]]).logprobs[0].tobytes() for datum in batch] == whole
    output = engine.forward_backward([batch], get_loss("importance_sampling", {}))
    assert [each.tobytes() for each in output.logprobs] == whole
    theirs = ordinary.forward_backward([batch], get_loss("importance_sampling", {}))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for mine, other in zip(output.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance)
    expected = {name: parameter.grad for name, parameter in ordinary.hf_parameters()}
    for name, parameter in engine.hf_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0.1, atol=tolerance * largest)


@pytest.mark.parametrize(("family", "dtype"), [("gemma2", "bfloat16"), ("windows", "bfloat16"), ("qwen2", "float32")])
def test_sampled_tokens_have_the_trainers_log_probs(
    family: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several prompts at once, two of which begin alike, at two temperatures, with and without a cut."""
    model = _model(tmp_path, family)
    args = {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": 128}
    config = GeneratorConfig(
        model=model,
        dtype=dtype,
        numerics="bitwise",
        max_model_len=64,
        max_num_seqs=16,
        kept_sets=True,
        engine_args=args,
    )
    for name, value in generator_env(config).items():
        monkeypatch.setenv(name, value)
    from generator.engine import GenerationEngine

    engine, trainer = (
        GenerationEngine(config),
        BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype=dtype)),
    )
    prompts = [[3, 1, 4], [*range(3, 23)], [*range(3, 21), 40]]
    kinds = [SamplingParams(max_tokens=n, temperature=t, top_p=p, seed=n) for n, t, p in ((9, 1, 1), (12, 0.7, 0.8))]
    requests = [(prompt, kind) for prompt in prompts for kind in kinds]

    async def sampled() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(prompt, kind, 2) for prompt, kind in requests))

    batch: list[Datum] = []
    for (prompt, kind), completions in zip(requests, asyncio.run(sampled()), strict=True):
        for each in completions:
            turn = Turn(prompt_tokens=tuple(prompt), completion=each)
            rollout = Rollout(turns=(turn,), reward=1.0, sampling=kind)
            batch.append(rollout_to_datum(rollout, np.ones(len(each.tokens))))
    engine.close()
    assert sum(datum.kept is not None for datum in batch) == 6
    for datum, scored in zip(batch, trainer.forward([batch]).logprobs, strict=True):
        where = datum.weights > 0
        assert where.sum() > 0
        assert scored[where].tobytes() == datum.loss_inputs["logprobs"][where].tobytes()
