"""Bars, and the record of the machine that a figure belongs to."""

import json
import math

import pytest

from benchmarks.__main__ import BENCHMARKS, table
from benchmarks.harness import Bar, machine, parser, print_result


@pytest.mark.parametrize(
    ("value", "at_most", "ok"),
    [(1.0, True, True), (1.1, True, False), (1.0, False, True), (0.9, False, False), (math.nan, True, False)],
)
def test_a_bar_is_met_up_to_its_limit(value: float, at_most: bool, ok: bool) -> None:
    assert Bar(name="bar", value=value, limit=1.0, at_most=at_most).ok is ok


def test_machine_names_the_caps_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine()["isa_caps"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_quick_and_smoke_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser("", quick="less").parse_args(["--quick", "--smoke"])
    assert "not allowed with" in capsys.readouterr().err


def test_results_page_says_which_kind_of_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    print_result(BENCHMARKS[0], [Bar(name="ratio", value=2.0, limit=1.0)], {"seconds": 0.5})
    page = table([json.loads(capsys.readouterr().out)])
    assert "| step | ratio | 2 | <= 1 | **no** |" in page
    assert "bfloat16 instructions, ATEN_CPU_CAPABILITY=avx2)" in page
    assert "| seconds | 0.5 |" in page
