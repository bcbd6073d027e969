"""Milliseconds of the gated delta rule over 2,048 tokens on the CPU, beside transformers' own chunked function.

    python -m plugins.families.benchmarks.delta_rule [--quick | --smoke] [--repeats N] [--threads N]

Forward and backward pass of one layer of Qwen3.5: 16 heads, keys and values of 128 dimensions, one document. Bars: at
most a third of transformers' time; values and gradients in float64 within 1e-10 of the recurrence, token by token.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks.harness import Bar, parser, print_result
from ownloop_families.gated_delta import gated_delta_rule

HEADS, DIM = 16, 128
Rule = Callable[..., Tensor]


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one repeat")
    options_parser.add_argument("--repeats", type=int, default=7, help="measured rounds, after a warm-up round")
    options_parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    length, repeats = (64, 1) if options.smoke else (2048, 1 if options.quick else options.repeats)
    figures = measure(length, repeats)
    error = float64_error(32 if options.smoke else 200)
    for name, value in {**figures, "float64_error": error}.items():
        print(f"{name:<24}{value:12.4g}", flush=True)
    bars = [
        Bar(
            name="ratio_to_transformers",
            value=figures["milliseconds"] / figures["milliseconds_transformers"],
            limit=1 / 3,
        ),
        Bar(name="float64_error", value=error, limit=1e-10),
    ]
    print_result("delta_rule", bars, {"tokens": length, "threads": options.threads, **figures})


def inputs(length: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values [L, heads, DIM], decays and betas [L, heads], which need gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, heads, DIM, generator=generator, dtype=dtype) for _ in range(3))
    g, beta = (torch.rand(length, heads, generator=generator, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, g.neg(), beta)]


def measure(length: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of both, in rounds in which they take turns, and how far their values are apart."""

    def transformers(*row: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(*(x[None] for x in row), use_qk_l2norm_in_kernel=True)[0][0]

    rules: dict[str, Rule] = {
        "milliseconds": lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, [length]),
        "milliseconds_transformers": transformers,
    }
    row = inputs(length, HEADS, torch.float32)
    grad = torch.randn(length, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    taken: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(1 + repeats):
        for name, rule in rules.items():
            start = time.perf_counter()
            torch.autograd.grad(rule(*row), row, grad)
            taken[name].append(1e3 * (time.perf_counter() - start))
    with torch.no_grad():
        one, other = (rule(*row) for rule in rules.values())
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    return {**medians, "difference": float((one - other).norm() / other.norm())}


def float64_error(length: int) -> float:
    """The worst relative error of values and gradients against the recurrence, with two heads in float64."""
    row = inputs(length, 2, torch.float64)
    q, k, v, g, beta = row
    grad = torch.randn(length, 2, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = gated_delta_rule(q, k, v, g, beta, [length]), token_by_token(q, k, v, g, beta)
    results = [[out, *torch.autograd.grad(out, row, grad)] for out in outputs]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one document, as https://arxiv.org/abs/2412.06464 writes it."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
    outputs: list[Tensor] = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t] * q.shape[-1] ** -0.5))
    return torch.stack(outputs)


if __name__ == "__main__":
    main()
