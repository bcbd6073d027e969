"""Bars, and the record of the machine that a figure belongs to."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, ON_REQUEST
from benchmarks.harness import Bar, machine, parser, print_result
from benchmarks.results_page import PAGE, page, save


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


def test_a_machine_without_git_gets_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    print_result("none", [], {})
    assert json.loads(capsys.readouterr().out)["commit"] == "unknown"


def test_quick_and_smoke_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser("", quick="less").parse_args(["--quick", "--smoke"])
    assert "not allowed with" in capsys.readouterr().err


def test_results_page_shows_all_kinds_of_processor_side_by_side(tmp_path: Path) -> None:
    figures = {"seconds": [0.5, 1.0]}
    for kind, value, caps in (("bf16", 2.0, {}), ("fp32", 0.5, {"ATEN_CPU_CAPABILITY": "avx2"}), ("amx", 0.25, {})):
        bar = {"name": "ratio", "value": value, "limit": 1.0, "at_most": True, "ok": value <= 1.0}
        made = {"cpu": "C", "cores": 2, "kind": kind, "isa_caps": caps, "python": "3.11"}
        save({"benchmark": "step", "bars": [bar], "figures": figures, "machine": made, "commit": "abc"}, tmp_path)
    shown = page(BENCHMARKS, tmp_path)
    assert "| step | ratio | <= 1 | **2, not met** | 0.5 | 0.25 |" in shown
    assert (
        "`python -m benchmarks.step` at commit abc, 2 cores of C (with fast bfloat16 instructions), Python 3.11."
        in shown
    )
    assert "(without fast bfloat16 instructions, ATEN_CPU_CAPABILITY=avx2)" in shown
    assert shown.count("| seconds | 0.5, 1 |") == 3

    (tmp_path / "fp32" / "step.json").unlink()
    assert "| step | ratio | <= 1 | **2, not met** | not measured | 0.25 |" in page(BENCHMARKS, tmp_path)


def test_the_page_is_made_of_the_kept_results() -> None:
    assert page((*BENCHMARKS, *ON_REQUEST)) == PAGE.read_text()


def test_a_result_is_kept_under_the_kind_of_its_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_result("step", [Bar(name="ratio", value=2.0, limit=1.0)], {"seconds": 0.5})
    save(result := json.loads(capsys.readouterr().out), tmp_path)
    (file,) = tmp_path.glob("*/step.json")
    assert file.parent.name == machine()["kind"]
    assert json.loads(file.read_text()) == result
