"""Milliseconds of one layer's attention over 2,048 tokens on the CPU, in each way that can compute it.

    python -m benchmarks.attention [--quick | --smoke] [--repeats N] [--threads N]

Forward and backward pass with SmolLM2's heads. `blocks` are products over tiles, `kernel` is PyTorch's kernel, a call
for each document, with a mask where documents share a prefix. `chosen` is what a trainer computes. Bar: the choice
takes at most a quarter more time than the best of the others, for documents of any length.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from benchmarks.harness import Bar, parser, print_result
from rl.data.packing import Document
from rl.system.hardware import cpu_dtype
from trainer.engines.pytorch.block_attention import block_attention, document_mask, plan_attention
from trainer.engines.pytorch.document_attention import document_attention, plan_row, product_dtype

HEADS, KEY_VALUE_HEADS, DIM = 9, 3, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(num_tokens: int) -> dict[str, tuple[Document, ...]]:
    """Rows of about so many tokens."""
    lengths = [length for length in (64, 128, 256, 512, 1024, 2048) if length <= num_tokens]
    plain = {str(length): (Document(length),) * (num_tokens // length) for length in lengths}
    if num_tokens < 2048:
        return plain
    return {
        **plain,
        "55+8x6": (Document(55, (6,) * 8),) * 20,
        "200+8x100": (Document(200, (100,) * 8),) * 2,
        "60+64x30": (Document(60, (30,) * 64),),
    }


def ways(documents: Sequence[Document], dtype: torch.dtype) -> dict[str, Attend]:
    """The ways to compute a row, by name."""
    plan, parts, sizes = plan_attention(documents), plan_row(documents), [document.num_tokens for document in documents]
    masks = [document_mask(each, 0, each.num_tokens) if each.suffixes else None for each in documents]

    def kernel(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        split = [x.to(dtype).transpose(0, 1)[None].split(sizes, dim=2) for x in (q, k, v)]
        outputs = [
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            for mask, q, k, v in zip(masks, *split, strict=True)
        ]
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).to(q.dtype)

    result: dict[str, Attend] = {
        "chosen": lambda q, k, v: document_attention(q[None], k[None], v[None], parts, scale=None)[0],
        "kernel": lambda q, k, v: kernel(q, k, v, dtype),
        "blocks": lambda q, k, v: block_attention(q, k, v, plan, scale=None, dtype=dtype),
    }
    if dtype != torch.float32:
        result["kernel_float32"] = lambda q, k, v: kernel(q, k, v, torch.float32)
        result["blocks_float32"] = lambda q, k, v: block_attention(q, k, v, plan, scale=None, dtype=torch.float32)
    return result


def measure(documents: Sequence[Document], dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Milliseconds of each way, medians of rounds in which they take turns."""
    length = sum(document.num_tokens for document in documents)
    q, k, v = (torch.randn(length, n, DIM).to(dtype) for n in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grad = torch.randn(length, HEADS, DIM).to(dtype)
    taken: dict[str, list[float]] = {}
    for repeat in range(1 + repeats):
        order = list(ways(documents, dtype).items())
        first = repeat % len(order)  # whoever comes first finds caches that others' gradients have filled
        for name, attend in order[first:] + order[:first]:
            start = time.perf_counter()
            torch.autograd.grad(attend(*inputs), inputs, grad)
            if repeat:
                taken.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one repeat")
    options_parser.add_argument("--repeats", type=int, default=9, help="measured rounds, after a warm-up round")
    options_parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, cpu_dtype())
    figures: dict[str, float] = {}
    worst = 0.0
    for form, documents in rows(128 if options.smoke else 2048).items():
        milliseconds = measure(documents, dtype, 1 if options.quick or options.smoke else options.repeats)
        print(f"{form:<12}" + "".join(f"{name} {value:7.1f} ms   " for name, value in milliseconds.items()), flush=True)
        figures |= {f"ms_{name}_{form}": value for name, value in milliseconds.items()}
        worst = max(worst, milliseconds.pop("chosen") / min(milliseconds.values()))
    print_result(
        "attention",
        [Bar(name="chosen_over_best_max", value=worst, limit=1.25)],
        {"dtype": cpu_dtype(), "product_dtype": str(product_dtype(dtype)), "threads": options.threads, **figures},
    )


if __name__ == "__main__":
    main()
