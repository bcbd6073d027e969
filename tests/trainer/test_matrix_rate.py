"""The measured rate of matrix products, and the file that keeps it."""

import json
import time
from pathlib import Path

import pytest
import torch

from trainer.matrix_rate import matrix_rate

CPU = torch.device("cpu")


def test_the_rate_is_that_of_a_product_timed_here(tmp_path: Path) -> None:
    rate = matrix_rate(CPU, "float32", tmp_path / "rates.json")
    a = torch.randn(512, 512)
    seconds: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    assert 0.1 < rate / (2 * 512**3 / min(seconds)) < 10  # other sizes and a busy machine, but the same unit


def test_the_best_rate_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "rates.json"
    matrix_rate(CPU, "float32", file)
    (key,) = json.loads(file.read_text())
    assert key.endswith("float32")
    file.write_text(json.dumps({key: 1e18, "another machine": 5.0}))
    assert matrix_rate(CPU, "float32", file) == 1e18
    matrix_rate(CPU, "bfloat16", file)
    assert json.loads(file.read_text()).items() >= {key: 1e18, "another machine": 5.0}.items()


def test_a_rate_of_a_busy_machine_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    matrix_rate(CPU, "float32", file)
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: 1.0}))
    assert matrix_rate(CPU, "float32", file) == json.loads(file.read_text())[key] > 1e6


@pytest.mark.parametrize("contents", ["", "[1]", '{"a": "fast"}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, contents: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(contents)
    assert matrix_rate(CPU, "float32", file) > 1e6
    assert len(json.loads(file.read_text())) == 1


def test_a_cache_that_cannot_be_written_is_no_error() -> None:
    assert matrix_rate(CPU, "float32", Path("/proc/ownloop/rates.json")) > 1e6
