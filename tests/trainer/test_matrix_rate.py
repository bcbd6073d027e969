"""The measured rate of matrix products, and the file that keeps it."""

import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.matrix_rate import matrix_rate

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seconds", "size"), [(0.001, 1024), (0.25, 256)])
def test_the_rate_is_operations_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, size: int
) -> None:
    """A product of two square matrices has two operations for each term. Where products take long they are smaller."""
    clock = SimpleNamespace(perf_counter=partial(next, itertools.count(step=seconds)))
    monkeypatch.setattr("trainer.matrix_rate.time", clock)
    for dtype in ("float32", "bfloat16"):
        assert matrix_rate(CPU, dtype, tmp_path / "rates.json") == pytest.approx(2 * size**3 / seconds)


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
