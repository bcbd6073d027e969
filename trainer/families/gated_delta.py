"""The gated delta rule and its causal convolution over packed rows, in plain PyTorch; documents start afresh.

The rule (https://arxiv.org/abs/2412.06464) updates a state S [K, V] of each head with each token:

    S <- exp(g) S + k (beta (v - exp(g) k^T S))^T        o = S^T q

Chunks of a document are computed as matrices, and the state goes from chunk to chunk
(https://arxiv.org/abs/2406.06484). All documents of a row are computed side by side: a step takes the next chunk of
every document that has one, so that there are as many steps as the longest document has chunks.

Legend: L tokens of a row, H heads, K dimensions of a key, V of a value, C tokens of a chunk, N chunks of all documents,
D channels and W width of the convolution.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

_CHUNK = 64


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """SiLU of the convolution of x [L, D] with weight [D, W] -> [L, D].

    `positions` [L] begin at 0 in every document; tokens of earlier documents count as zeros.
    """
    width = weight.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(width, len(x))):
        seen = (positions >= back)[back:, None]
        out = out + F.pad(x[:-back] * seen * weight[:, -1 - back], (0, 0, back, 0))
    return F.silu(out)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sizes: Sequence[int]) -> Tensor:
    """q, k [L, H, K], v [L, H, V], g and beta [L, H] -> [L, H, V] in the dtype of `v`, computed in float32 or wider.

    `sizes` are the numbers of tokens of the documents. Queries and keys are normalised here; g is at most 0.
    """
    chunks = _chunks(sizes, q.device)
    dtype = torch.promote_types(v.dtype, torch.float32)
    wide = [x.to(dtype) for x in (_normalised(q.to(dtype)) * q.shape[-1] ** -0.5, _normalised(k.to(dtype)), v, g, beta)]
    queries, keys, values, decays, betas = (_gathered(x, chunks) for x in wide)
    log_decay = decays.cumsum(-1)  # [N, H, C], from the chunk's first token on
    within, new_values, read_keys = _within_chunks(queries, keys, values, log_decay, betas)
    queries = queries * log_decay.exp()[..., None]
    keys = keys * (log_decay[..., -1:] - log_decay).exp()[..., None]
    whole_decay = log_decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(len(sizes), q.shape[1], q.shape[-1], v.shape[-1], dtype=dtype)
    outputs: list[Tensor] = []
    # Each is split once: the gradient of a slice would be a tensor as large as the whole, for every step.
    of_steps = (x.split(chunks.counts) for x in (queries, keys, within, new_values, read_keys, whole_decay))
    for query, key, inside, new_value, read_key, decay in zip(*of_steps, strict=True):
        state = state[: len(query)]  # longer documents come first
        new = new_value - read_key @ state
        outputs.append(query @ state + inside @ new)
        state = state * decay + key.transpose(-1, -2) @ new
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.places].to(v.dtype)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Where the tokens of a row are in its chunks."""

    index: Tensor
    """[N, C] the token at each place; any, where there is none."""
    is_token: Tensor | None
    """[N, C], or None if there is a token at every place."""
    places: Tensor
    """[L] the place of each token, counted over all chunks."""
    counts: list[int]
    """How many chunks each step has: one of each document that is long enough, the longest document's first."""


def _chunks(sizes: Sequence[int], device: torch.device) -> _Chunks:
    longest, starts = max(sizes), [0, *itertools.accumulate(sizes)]
    size = min(_CHUNK, 1 << (longest - 1).bit_length())
    order = sorted(range(len(sizes)), key=lambda document: -sizes[document])
    steps = [[i for i in order if sizes[i] > begin] for begin in range(0, longest, size)]
    first = torch.tensor([starts[i] + number * size for number, step in enumerate(steps) for i in step])
    last = torch.tensor([starts[i + 1] for step in steps for i in step])
    index = first[:, None] + torch.arange(size)
    is_token = index < last[:, None]
    places = torch.empty(starts[-1], dtype=torch.long)
    places[index[is_token]] = is_token.flatten().nonzero()[:, 0]
    return _Chunks(
        index.clamp(max=starts[-1] - 1).to(device),
        None if bool(is_token.all()) else is_token.to(device),
        places.to(device),
        [len(step) for step in steps],
    )


def _gathered(x: Tensor, chunks: _Chunks) -> Tensor:
    """[L, H, ...] -> [N, H, C, ...] with zeros where there is no token."""
    placed = x[chunks.index]
    if chunks.is_token is not None:
        placed = placed * chunks.is_token.reshape(*chunks.is_token.shape, *(1 for _ in x.shape[1:]))
    return placed.transpose(1, 2)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens of a chunk do to each other: weights of new values [N, H, C, C], new values and the keys that read.

    New values [N, H, C, V] are of a state that is zero; `keys @ state` is to be subtracted, with keys [N, H, C, K].
    """
    size = q.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    scaled_keys = k * beta[..., None]
    system = (scaled_keys @ k.transpose(-1, -2)) * decay
    both = torch.cat([v * beta[..., None], scaled_keys * log_decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    return (q @ k.transpose(-1, -2)) * decay, new_values, read_keys
