"""The bodies of `ops` on a GPU. Arguments are as `ops` prepares them. Written against vLLM 0.32.

What sums is vLLM's: its batch-invariant Triton kernels for products, norms and the log-softmax, and its Triton
attention without split keys. What goes element by element is PyTorch's, eager, one operator after the other. Triton's
interpreter runs the kernels without a GPU (`TRITON_INTERPRET=1`); no GPU has run this file.

Attention is one function, of queries whose keys lie in pages. A generator's cache has pages of many tokens; a packed
row of a trainer has pages of one token, so that sequences may share keys.
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from triton import knobs
from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from ownloop_bitwise.operands import Packed, Sequences

_OLDEST = (8, 0)  # vLLM's mode


@cache
def prepare() -> str:
    """Makes this process compute as all others of a run. Returns what must be the same in all of them.

    Raises ValueError for a GPU that vLLM's kernels are not for.
    """
    found = torch.cuda.get_device_capability()
    if found < _OLDEST:
        raise ValueError(
            f"numerics is 'bitwise', which needs a GPU of compute capability {'.'.join(map(str, _OLDEST))} or higher; "
            f"this one has {'.'.join(map(str, found))}"
        )
    # By default a product in float32 rounds its inputs to TF32.
    knobs.language.fp32_default = "ieee"
    # vLLM tunes the blocks of a product's sum for its width, and the generator's fused projections are wider than the
    # trainer's. The default is one block for all.
    batch_invariant_configs._TUNED_MATMUL_CONFIGS_FOR_DEVICE = None  # pyright: ignore[reportPrivateUsage]
    batch_invariant_configs._TUNED_MATMUL_CONFIGS_RESOLVED = True  # pyright: ignore[reportPrivateUsage]
    return f"compute capability {'.'.join(map(str, found))}"


def product(rows: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """As `ops.product`, of rows [M, K]."""
    prepare()
    out.copy_(batch_invariant.linear_batch_invariant(rows, weight.memory, bias).view(out.shape))


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    """As `ops.rms_norm`."""
    weight = weight.float() + shift if shift else weight
    normed = batch_invariant.rms_norm_batch_invariant(x, weight, eps)
    assert isinstance(normed, Tensor)  # a residual would make two
    return normed


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """As `ops.soft_cap`."""
    return ((x.float() / cap).tanh() * cap).to(x.dtype)


def gate_mul(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """As `ops.gate_mul`, of rows."""
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def rotate(x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    """As `ops.rotate`, of dimensions i and i + D/2."""
    cosines, sines = table[positions][:, None].chunk(2, -1)
    sines = -sines if inverse else sines
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cosines - two * sines, two * cosines + one * sines], -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int, cap: float) -> Tensor:
    """As `ops.attend`. The queries of a sequence are at its end."""
    assert sequences.pages is not None
    out, rows = torch.zeros_like(q), sequences.query_rows
    lengths = sequences.key_starts.diff().to(torch.int32)
    of_rows = torch.empty_like(q[: len(rows)])
    where = (sequences.query_starts.to(torch.int32), lengths, sequences.pages)
    attend_pages(q[rows], k[:, None], v[:, None], of_rows, *where, scale, window, cap)
    out[rows] = of_rows
    return out


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    pages: Tensor,
    scale: float,
    window: int,
    cap: float,
) -> None:
    """Fills `out` [L, heads, D]: q [L, heads, D] over keys and values [pages, size, groups, D].

    Sequence i has the queries from `query_starts[i]` to `query_starts[i + 1]`, which are its last tokens, and
    `lengths[i]` keys in `pages[i]`, in order. All three are int32.
    """
    prepare()
    unified_attention(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=query_starts,
        max_seqlen_q=1,  # vLLM chooses its tiles by it; without buffers for split keys it is used for nothing else
        seqused_k=lengths,
        max_seqlen_k=pages.shape[1] * k.shape[1],
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=pages,
        softcap=cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


def log_sum_exp(
    values: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """As `ops.log_sum_exp`. What follows a row's last element adds zeros to its sum."""
    places = starts[:, None] + torch.arange(int((ends - starts).max()), device=values.device)
    rows = values.flatten()[places.clamp(max=values.numel() - 1)]
    return log_sum_exp_rows(rows.masked_fill(places >= ends[:, None], -torch.inf), scale, mean)


def log_sum_exp_rows(logits: Tensor, scale: Tensor | None, mean: bool) -> tuple[Tensor, Tensor | None]:
    """As `ops.log_sum_exp_rows`.

    The largest value of a log-softmax is minus the log of the sum of exp(x - max), so the log-sum follows from it.
    """
    values = logits.float() if scale is None else logits.float() * scale[:, None]
    logprobs = batch_invariant.log_softmax(values)
    lse = values.amax(-1) - logprobs.amax(-1)
    if not mean:
        return lse, None
    return lse, (logprobs.exp() * values.masked_fill(values == -torch.inf, 0.0)).sum(-1)
