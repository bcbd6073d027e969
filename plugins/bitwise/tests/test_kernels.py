"""The kernels: equal bits for any rows, threads and instructions, and errors against float64."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ownloop_bitwise import cpu, library, operands, ops

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (48, 32), (100, 100), (33, 577), (257, 1537), (960, 576))
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_same_bits_whatever_other_rows_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    x, w, b = torch.randn(260, k).to(dtype), (torch.randn(n, k) * 0.05).to(dtype), torch.randn(n).to(dtype)
    packed = ops.Packed.of(w)
    torch.set_num_threads(2)
    whole = ops.product(x, packed, b)
    torch.set_num_threads(1)
    for rows in range(1, 131):
        assert bits(ops.product(x[:rows], packed, b)) == bits(whole[:rows]), rows
        assert bits(ops.product(x[rows : 2 * rows], packed, b)) == bits(whole[rows : 2 * rows]), rows
    columns = ops.Packed.of(w[n // 3 :])
    assert bits(ops.product(x, columns, b[n // 3 :])) == bits(whole[:, n // 3 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_as_exact_as_one_chain_of_float32(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    x, w, b = torch.randn(37, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    exact = x.double() @ w.double().T + b.double()
    # |error| <= K u sum |x w| (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and one rounding.
    bound = (k + 1) * 2.0**-24 * (x.double().abs() @ w.double().abs().T + b.double().abs()) + EPS[dtype] * exact.abs()
    assert ((ops.product(x, ops.Packed.of(w), b).double() - exact).abs() <= bound).all()


def _sequence(length: int) -> ops.Sequences:
    rows = np.arange(length)
    return ops.Sequences.of([rows], [rows + 1], [rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(3, 1, 32), (9, 3, 64), (4, 4, 80), (2, 1, 8), (4, 2, 28)])
@pytest.mark.parametrize("window", [0, 1, 37])
def test_attention_has_the_same_bits_one_query_at_a_time_in_chunks_and_from_pages(
    heads: int, groups: int, size: int, dtype: torch.dtype, window: int
) -> None:
    """With a window, what a query does not see may be anything in a generator's pages."""
    length, scale = 150, size**-0.5
    q = torch.randn(length, heads, size).to(dtype)
    k, v = torch.randn(2, length, groups, size).to(dtype)
    whole = ops.attend(q, k, v, _sequence(length), scale, window)
    wide = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window if window else -length)
    expected: Tensor = attention(*wide, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    assert (whole.double() - expected).abs().max() < 32 * EPS[dtype]
    rows = np.arange(length)
    alone = ops.Sequences.of(
        [rows[i : i + 1] for i in rows], [rows[i : i + 1] + 1 for i in rows], [rows[: i + 1] for i in rows]
    )
    assert bits(ops.attend(q, k, v, alone, scale, window)) == bits(whole)
    cuts = [(0, 7), (7, 100), (100, 150)]
    chunks = ops.Sequences.of(
        [rows[a:b] for a, b in cuts], [rows[a:b] + 1 for a, b in cuts], [rows[:b] for _, b in cuts]
    )
    assert bits(ops.attend(q, k, v, chunks, scale, window)) == bits(whole)
    places = torch.randperm(400)[:length]
    pages = torch.randn(400, groups, 2 * size).to(dtype)
    pages[places] = torch.cat([k, v], -1)
    paged = ops.Sequences.of([rows], [rows + 1], [places.numpy()])
    torch.set_num_threads(2)
    assert bits(ops.attend(q, pages[..., :size], pages[..., size:], paged, scale, window)) == bits(whole)
    if window:
        last = length - window
        pages[places[:last]] = torch.nan
        newest = ops.Sequences.of([rows[-1:]], [rows[-1:] + 1], [places.numpy()])
        found = ops.attend(q, pages[..., :size], pages[..., size:], newest, scale, window)
        assert bits(found[-1]) == bits(whole[-1])


def _row_functions(dtype: torch.dtype) -> dict[str, tuple[Callable[[slice], Tensor], Callable[[], Tensor], float]]:
    """Each row-wise function of 130 rows, the same in float64, and the units in the last place that they may differ."""
    x, up = torch.randn(130, 100).to(dtype) * 4, torch.randn(130, 100).to(dtype)
    w, table = (
        torch.randn(100).to(dtype),
        operands.rope_table(tuple(float(f) for f in 10000 ** -(torch.arange(25) / 25)), 200),
    )
    positions, heads = torch.randperm(200)[:130], x.view(130, 2, 50)
    logits = torch.randn(130, 1003).to(dtype) * 5
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    a, b = heads.double().chunk(2, -1)
    scale = torch.rand(130) + 0.5
    return {
        "norm": (
            lambda rows: ops.rms_norm(x[rows], w, 1e-5),
            lambda: torch.nn.functional.rms_norm(x.double(), (100,), w.double(), 1e-5),
            8,
        ),
        "gemma's norm": (
            lambda rows: ops.rms_norm(x[rows], w, 1e-5, 1.0),
            lambda: torch.nn.functional.rms_norm(x.double(), (100,), w.double() + 1, 1e-5),
            8,
        ),
        "silu": (
            lambda rows: ops.gate_mul(x[rows], up[rows]),
            lambda: torch.nn.functional.silu(x.double()) * up.double(),
            8,
        ),
        "gelu": (
            lambda rows: ops.gate_mul(x[rows], up[rows], gelu=True),
            lambda: torch.nn.functional.gelu(x.double(), approximate="tanh") * up.double(),
            8,
        ),
        "cap": (lambda rows: ops.soft_cap(x[rows], 5.0), lambda: 5 * (x.double() / 5).tanh(), 8),
        "rotate": (
            lambda rows: ops.rotate(heads[rows], table, positions[rows]),
            lambda: torch.cat([a * cos - b * sin, b * cos + a * sin], -1),
            8,
        ),
        "log_sum_exp": (
            lambda rows: ops.log_sum_exp_rows(logits[rows], scale[rows])[0],
            lambda: (logits.double() * scale[:, None].double()).logsumexp(-1),
            8,
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["norm", "gemma's norm", "silu", "gelu", "cap", "rotate", "log_sum_exp"])
def test_a_function_of_rows_has_the_same_bits_for_any_rows_and_small_errors(name: str, dtype: torch.dtype) -> None:
    function, exact, units = _row_functions(dtype)[name]
    torch.set_num_threads(2)
    whole = function(slice(None))
    torch.set_num_threads(1)
    for row in range(130):
        assert bits(function(slice(row, row + 1))) == bits(whole[row : row + 1])
        assert bits(function(slice(0, row + 1))) == bits(whole[: row + 1])
    expected = exact()
    eps = 2.0**-24 if name == "log_sum_exp" else EPS[dtype]
    assert ((whole.double() - expected).abs() <= units * eps * (1 + expected.abs()) * 4).all()


def test_the_log_of_a_sum_counts_the_elements_between_start_and_end_alone() -> None:
    values = torch.randn(5000) * 3
    starts, ends = torch.tensor([0, 7, 300, 301]), torch.tensor([7, 300, 301, 5000])
    scale = torch.tensor([1.0, 0.7, 1.3, 2.0])
    lse, mean = ops.log_sum_exp(values, starts, ends, scale, mean=True)
    assert mean is not None
    for i in range(4):
        z = values[starts[i] : ends[i]].double() * float(scale[i])
        assert abs(float(lse[i]) - float(z.logsumexp(0))) < 2e-6
        assert abs(float(mean[i]) - float((z.softmax(0) * z).sum())) < 2e-5
    alone, _ = ops.log_sum_exp_rows(values[None, 7:300].contiguous(), scale[1:2])
    assert bits(alone) == bits(lse[1:2])


def _everything(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    for module in (cpu, operands):
        monkeypatch.setattr(module, "kernels", lambda: loaded)
    torch.manual_seed(1)
    found: dict[str, bytes] = {}
    for dtype in DTYPES:
        x, w = torch.randn(29, 131).to(dtype), torch.randn(57, 131).to(dtype)
        found[f"product {dtype}"] = bits(ops.product(x, ops.Packed.of(w), torch.randn(57).to(dtype)))
        q, k, v = (torch.randn(70, heads, 48).to(dtype) for heads in (6, 2, 2))
        found[f"attention {dtype}"] = bits(ops.attend(q, k, v, _sequence(70), 0.2))
        falling = (torch.randn(9, 203) * 3).sort(descending=True).values
        found[f"nucleus {dtype}"] = bits(ops.nucleus(falling, torch.full((9,), 150), torch.linspace(0.1, 1, 9)))
        for name, (function, _, _) in _row_functions(dtype).items():
            found[f"{name} {dtype}"] = bits(function(slice(None)))
    return found


def test_all_instructions_give_the_same_bits_but_for_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = library.instruction_set()
    x86 = ("avx512_bf16", "avx512", "avx2")
    others = x86[x86.index(widest) :] if widest in x86 else (widest,)
    plain = _everything(library.load("plain"), monkeypatch)
    for instructions in others:
        found = _everything(library.load(instructions), monkeypatch)
        differing = {name for name, value in found.items() if value != plain[name]}
        assert differing <= ({"product torch.bfloat16"} if instructions == "avx512_bf16" else set()), instructions


def test_without_a_compiler_or_its_instructions_the_user_reads_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "cpu_features", lambda: frozenset({"sse4_2"}))
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    with pytest.raises(ValueError, match="AVX2 and FMA"):
        library.instruction_set()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler"):
        library.build("plain", tmp_path)
