"""The gated delta rule over packed rows, and Qwen3.5's layers of it, in plain PyTorch; documents start afresh.

The rule (https://arxiv.org/abs/2412.06464) updates a state S [K, V] of each head with each token:

    S <- exp(g) S + k (beta (v - exp(g) k^T S))^T        o = S^T q

Chunks of a document are computed as matrices, and the state goes from chunk to chunk
(https://arxiv.org/abs/2406.06484). All documents of a row are computed side by side: a step takes the next chunk of
every document that has one, so that there are as many steps as the longest document has chunks.

A step computes all that its chunks need, so that its tensors stay in the processor's cache. The backward pass is
written out, and goes through the steps once, from the last to the first.

On a GPU, in bfloat16, the kernels of the package fla-core compute the rule where it is installed. In float32 they would
round products to TensorFloat-32, so PyTorch computes.

Legend: L tokens of a row, H heads, K dimensions of a key, V of a value, C tokens of a chunk, B chunks of a step (of
every document and head), D channels and W width of the convolution.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ownloop_families.qwen3_5 import CHUNK

_KERNEL = "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


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
    """q, k [L, G, K], v [L, H, V], g and beta [L, H] -> [L, H, V] in the dtype of `v`.

    `sizes` are the numbers of tokens of the documents. Each of G groups of heads has queries and keys in common, which
    are normalised here; g is at most 0. PyTorch computes in float32 or wider.
    """
    if v.is_cuda and v.dtype == torch.bfloat16 and (kernel := installed_kernel()) is not None:
        return by_kernel(kernel, (q, k, v, g, beta), sizes)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out: Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, sizes, torch.is_grad_enabled())
    return out


def by_kernel(kernel: Kernel, row: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The rule by `chunk_gated_delta_rule` of fla, for the q, k, v, g and beta that `gated_delta_rule` takes.

    The kernel takes a batch of one row, scales queries by K ** -0.5, and adds 1e-6 to squared lengths, as PyTorch here.
    """
    q, k, v, g, beta = (x[None] for x in row)
    ends, on_host = _ends(tuple(sizes), v.device)
    out, _ = kernel(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends, cu_seqlens_cpu=on_host)
    return out[0]


@functools.lru_cache(maxsize=4)  # the same tensors again, by whose identity fla caches chunks
def _ends(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where documents begin and end, [documents + 1], on the device and on the host."""
    ends = torch.tensor([0, *itertools.accumulate(sizes)])
    return ends.to(device), ends


@functools.cache
def installed_kernel() -> Kernel | None:
    """fla's kernel, or None without it or without a GPU. Says once, in the trainer's log, what computes on the GPU."""
    if not torch.cuda.is_available():
        return None
    has_fla = importlib.util.find_spec("fla") is not None
    print(describe_kernel(has_fla=has_fla), flush=True)
    return resolve_name(_KERNEL) if has_fla else None


def describe_kernel(*, has_fla: bool) -> str:
    """Which kernels compute the rule on a GPU, as a sentence."""
    if has_fla:
        return "gated delta rule: kernels of fla in bfloat16, PyTorch in float32"
    return (
        "gated delta rule: PyTorch, which starts 130 kernels for every 64 tokens of a row's longest document in each "
        "layer and keeps six times the memory; the package fla-core, which is not installed, starts about 20 for a row"
    )


def by_documents(model: Any) -> None:
    """The `prepare` of Qwen3.5: changes the linear layers of a model of transformers in place.

    Their own functions ignore where documents begin, without an error, and an installed `fla` would replace them.
    """
    installed_kernel()  # says at the start what computes
    for layer in model.base_model.layers:
        if (module := getattr(layer, "linear_attn", None)) is not None:
            module.__class__ = type("GatedDeltaNetByDocuments", (_ByDocuments, type(module)), {})


class _ByDocuments(nn.Module):
    """The forward pass of `Qwen3_5GatedDeltaNet` for one packed row, with its parameters."""

    def forward(self, hidden_states: Tensor, document_bounds: Any, **options: object) -> Tensor:
        """[1, L, D] -> [1, L, D]; `document_bounds` are the row's `Bounds`."""
        del options
        return delta_layer(self, hidden_states, document_bounds.sizes)


def delta_layer(layer: Any, hidden: Tensor, sizes: Sequence[int]) -> Tensor:
    """The linear layer of Qwen3.5 over a row [1, L, D] of documents of these sizes -> [1, L, D].

    `layer` has the modules, parameters and sizes of transformers' `Qwen3_5GatedDeltaNet`.
    """
    mixed = layer.in_proj_qkv(hidden)[0]
    positions = torch.cat([torch.arange(size, device=mixed.device) for size in sizes])
    mixed = causal_convolution(mixed, layer.conv1d.weight[:, 0], positions)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (each.unflatten(-1, (-1, layer.head_k_dim)) for each in (q, k))
    g = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden)[0].float() + layer.dt_bias)
    out = gated_delta_rule(
        q, k, v.unflatten(-1, (-1, layer.head_v_dim)), g, layer.in_proj_b(hidden)[0].sigmoid(), sizes
    )  # [L, heads, head_v_dim]
    gate = layer.in_proj_z(hidden)[0].reshape(-1, layer.head_v_dim)
    out = layer.norm(out.reshape(-1, layer.head_v_dim), gate)
    return layer.out_proj(out.reshape(1, len(positions), -1))


class _GatedDeltaRule(torch.autograd.Function):
    # PyTorch calls `forward` with gradients switched off, so its last input says whether there will be a backward pass.
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *row, sizes, has_backward = inputs
        q, _, v, _, _ = row
        dtype = torch.promote_types(v.dtype, torch.float32)
        state = v.new_zeros(len(sizes) * v.shape[1], q.shape[-1], v.shape[-1], dtype=dtype)
        out, kept = _Rows(v), list[Tensor]()
        for places in _steps(sizes, v):
            chunks = _Chunks.read(row, places, dtype)
            # The longest documents come first, so the last ones are the first to end.
            values, state, step = _forward(chunks, state[: len(places)])
            out.write(places, values)
            if has_backward:
                kept += [places, *chunks, *step]
        ctx.save_for_backward(*row, *kept)
        return out.tokens()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # may be read once, where layers are recomputed
        row, kept = saved[:5], saved[5:]
        ends = 1 + len(_Chunks._fields), 1 + len(_Chunks._fields) + len(_Kept._fields)
        steps = [kept[i : i + ends[1]] for i in range(0, len(kept), ends[1])]
        d_row = [_Rows(x) for x in row]
        d_state = torch.zeros_like(_Kept(*steps[0][ends[0] :]).state)
        d_log_decay = d_state.new_zeros(len(d_state), 1)  # [B, 1] of each chunk's last token, by later chunks
        for step in reversed(steps):
            places, running = step[0], slice(len(step[0]))
            chunks, results = _Chunks(*step[1 : ends[0]]), _Kept(*step[ends[0] :])
            (d_out,), is_token = _read(grads, places, d_state.dtype)
            d_inputs = _backward(chunks, results, d_out * is_token[..., None], d_state[running], d_log_decay[running])
            for rows, d_input in zip(d_row, d_inputs, strict=True):
                rows.write(places, d_input)
        return *(rows.tokens() for rows in d_row), None, None


class _Chunks(NamedTuple):
    """The inputs of a step, normalised and in the dtype of the computation; zeros where there is no token."""

    keys: Tensor
    """[B, C, K], of length 1."""
    pairs: Tensor
    """[B, 2C, K]: keys times beta, which read what values replace, above queries, which read the output."""
    values: Tensor
    """[B, C, V]"""
    betas: Tensor
    """[B, C, 1]"""
    key_scale: Tensor
    """[B, C, 1]: what keys were multiplied by."""
    query_scale: Tensor
    """[B, C, 1]: what queries were multiplied by."""
    log_decay: Tensor
    """[B, C]: sums of g from the chunk's first token on."""

    @classmethod
    def read(cls, row: Sequence[Tensor], places: Tensor, dtype: torch.dtype) -> "_Chunks":
        """Reads the inputs of tokens and heads at `places` [B, C]."""
        (q, k, v, g, beta), is_token = _read(row, places, dtype)
        query_scale = (torch.linalg.vecdot(q, q) + 1e-6).rsqrt().mul(q.shape[-1] ** -0.5)[..., None]
        key_scale = (torch.linalg.vecdot(k, k) + 1e-6).rsqrt().mul(is_token)[..., None]
        beta = (beta * is_token)[..., None]
        keys = k * key_scale
        pairs = torch.cat([keys * beta, q * query_scale], 1)
        return cls(keys, pairs, v, beta, key_scale, query_scale, (g * is_token).cumsum(-1))

    def decays(self) -> tuple[Tensor, Tensor, Tensor]:
        """Factors from the chunk's start to rows of a pair [B, 2C, 1], to its end [B, C, 1] and through [B, 1, 1]."""
        last = self.log_decay[:, -1:]
        since_start = self.log_decay.exp().repeat(1, 2)
        return since_start[..., None], (last - self.log_decay).exp()[..., None], last.exp()[..., None]


class _Kept(NamedTuple):
    """What a step computes and its backward pass needs again."""

    state: Tensor
    """[B, K, V], before the chunk."""
    decay: Tensor
    """[B, C, C]: the factor from an earlier token to a later one; 0 from a later one."""
    solver: Tensor
    """[B, C, C]: the inverse of the system by which tokens of a chunk change each other's new values."""
    weights: Tensor
    """[B, 2C, C]: the system below its diagonal, above how much each token's output takes of each new value."""
    new: Tensor
    """[B, C, V]: the new values, which keys write to the state."""


def _forward(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, _Kept]:
    """The outputs of a step [B, C, V], the state after it, and what its backward pass needs."""
    since_start, to_end, whole = chunks.decays()
    size = chunks.keys.shape[1]
    decay = (chunks.log_decay[:, :, None] - chunks.log_decay[:, None]).exp().tril()
    weights = _by_decay(chunks.pairs @ chunks.keys.mT, decay)
    system, within = weights.chunk(2, 1)
    identity = torch.eye(size, dtype=state.dtype, device=state.device).expand_as(system)
    # Ones on the diagonal are implied.
    solver = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    # Nothing is changed in place here: where layers are recomputed, some products are taken from the first time.
    old, out = ((chunks.pairs @ state) * since_start).chunk(2, 1)
    new = solver @ (chunks.values * chunks.betas - old)
    after = torch.baddbmm(state * whole, chunks.keys.mT, new * to_end)
    return torch.baddbmm(out, within, new), after, _Kept(state, decay, solver, weights, new)


def _backward(
    chunks: _Chunks, kept: _Kept, d_out: Tensor, d_state: Tensor, d_log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a step's q, k, v, g and beta.

    `d_state` and `d_log_decay` are of the state after the step when it begins, and of the state before it at the end.
    """
    since_start, to_end, whole = chunks.decays()
    size = d_out.shape[1]
    d_new = (chunks.keys @ d_state).mul_(to_end).baddbmm_(kept.weights[:, size:].mT, d_out)
    d_old = kept.solver.mT @ d_new  # of the values times beta, less what keys read
    d_read = torch.cat([-d_old, d_out], 1)
    d_weights = d_read @ kept.new.mT
    # Of factors between tokens. On the diagonal, which is the largest part, they are 1.
    d_factors = (d_weights * kept.weights).unflatten(1, (2, size)).sum(1)
    d_factors.diagonal(dim1=1, dim2=2).zero_()
    d_weights = _by_decay(d_weights, kept.decay)
    d_weights[:, :size].diagonal(dim1=1, dim2=2).zero_()
    d_read *= since_start
    d_pairs, d_keys = d_read @ kept.state.mT, (kept.new * to_end) @ d_state.mT
    d_g = d_factors.sum(2) - d_factors.sum(1) - torch.linalg.vecdot(d_keys, chunks.keys)
    d_g += torch.linalg.vecdot(d_pairs, chunks.pairs).unflatten(1, (2, size)).sum(1)
    d_g[:, -1:] += d_log_decay
    d_pairs.baddbmm_(d_weights, chunks.keys)
    d_keys.baddbmm_(d_weights.mT, chunks.pairs)
    d_state.mul_(whole).baddbmm_(chunks.pairs.mT, d_read)
    torch.sum(d_state * kept.state, (1, 2), out=d_log_decay[:, 0])

    (d_scaled, d_queries), queries = d_pairs.chunk(2, 1), chunks.pairs[:, size:]
    by_betas = _dot(d_scaled, chunks.keys)
    d_beta = _dot(d_old, chunks.values) + by_betas
    # A change of length is lost: queries have the length K ** -0.5, keys 1.
    d_queries.addcmul_(queries, _dot(d_queries, queries), value=-queries.shape[-1])
    d_keys.addcmul_(d_scaled, chunks.betas)
    d_keys.addcmul_(chunks.keys, _dot(d_keys, chunks.keys), value=-1)
    return (
        d_queries * chunks.query_scale,
        d_keys * chunks.key_scale,
        d_old * chunks.betas,
        d_g.flip(1).cumsum(1).flip(1),
        d_beta[..., 0],
    )


def _by_decay(weights: Tensor, decay: Tensor) -> Tensor:
    """Both halves of `weights` [B, 2C, C] times `decay` [B, C, C]."""
    return (weights.unflatten(1, (2, -1)) * decay[:, None]).flatten(1, 2)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """[..., D] each -> [..., 1]."""
    return torch.linalg.vecdot(one, other)[..., None]


def _steps(sizes: Sequence[int], row: Tensor) -> Iterator[Tensor]:
    """For each step [B, C], where the tokens and heads of its chunks are in a row [L, H, ...], counted over both.

    Places without a token have the number after the last. The longest documents come first.
    """
    num_heads, starts = row.shape[1], [0, *itertools.accumulate(sizes)]
    longest = max(sizes)
    chunk = min(CHUNK, 1 << (longest - 1).bit_length())
    order = sorted(range(len(sizes)), key=lambda document: -sizes[document])
    for begin in range(0, longest, chunk):
        documents = [i for i in order if sizes[i] > begin]
        tokens = torch.tensor([starts[i] + begin for i in documents])[:, None] + torch.arange(chunk)
        ends = torch.tensor([starts[i + 1] for i in documents])[:, None]
        tokens = tokens.where(tokens < ends, starts[-1])[:, None]
        places = (tokens * num_heads + torch.arange(num_heads)[:, None]).clamp_(max=starts[-1] * num_heads)
        yield places.flatten(0, 1).to(row.device)


def _read(tensors: Sequence[Tensor], places: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Tensors [L, H, ...] at `places` -> [B, C, ...] each, and where there is a token [B, C]; anything elsewhere."""
    number = tensors[0].shape[0] * tensors[0].shape[1]
    flat = places.flatten().clamp(max=number - 1)
    read = [x.flatten(0, 1).index_select(0, flat).unflatten(0, places.shape).to(dtype) for x in tensors]
    return read, places < number


class _Rows:
    """A tensor like `like` [L, H, ...] that is written by places."""

    def __init__(self, like: Tensor) -> None:
        self._shape = like.shape
        self.rows = like.new_empty(1 + like.shape[0] * like.shape[1], *like.shape[2:])

    def write(self, places: Tensor, x: Tensor) -> None:
        """Writes x [B, C, ...]; what has no token goes to the row after the last."""
        self.rows[places] = x.to(self.rows.dtype)

    def tokens(self) -> Tensor:
        """[L, H, ...]"""
        return self.rows[:-1].view(self._shape)
