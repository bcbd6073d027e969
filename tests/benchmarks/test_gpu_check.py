"""`make gpu-check`: what it leaves out, what it judges, and the page that it writes. The whole of it runs in `slow`."""

import contextlib
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import checks, numerics, utilisation
from benchmarks.gpu.checks import CHECKS, Check, Finding, run_check
from benchmarks.harness import REPOSITORY
from tests.gpu_pretended.rehearsal import PARTS
from tests.waiting import LIMIT_S, wait_until

PRINTS = """
import json, sys
bars = [{"name": "speed", "value": 0.3, "limit": 0.4, "at_most": False, "ok": False}]
print("working")
print(json.dumps({"bars": bars, "figures": {"peak": 2.0}}))
"""


def _check(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, limit_s: float = LIMIT_S) -> Check:
    """A check whose module is this source."""
    (tmp_path / "made_up_check.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Check(name="made up", what="It works.", module="made_up_check", limit_s=limit_s)


def test_a_check_without_its_packages_is_left_out_and_said() -> None:
    check = Check(name="a", what="", module="benchmarks.none", needs=("json", "no_such_package"))
    finding = run_check(check, smoke=True)
    assert (finding.outcome, finding.why) == ("left out", "needs no_such_package")


def test_bars_are_judged_on_a_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = _check(tmp_path, PRINTS, monkeypatch)
    told: list[str] = []
    finding = run_check(check, smoke=False, tell=told.append)
    assert (finding.outcome, finding.why) == ("failed", "missed speed")
    assert told[0].startswith("working\n")
    assert run_check(check, smoke=True, tell=told.append).outcome == "passed"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time; time.sleep(3600)", "did not end within 1 s"),
        ("exit(3)", "ended with status 3"),
        ("raise SystemExit('no kernel image')", "ended with status 1: no kernel image"),
        ("print('done')", "its last line is 'done', which is no result"),
    ],
)
def test_a_check_that_hangs_or_dies_has_failed(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 1.0 if "did not end" in why else LIMIT_S
    finding = run_check(_check(tmp_path, source, monkeypatch, limit_s), smoke=False)
    assert (finding.outcome, finding.why) == ("failed", why)


def test_gpu_tests_that_were_all_skipped_have_failed(tmp_path: Path) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text("import pytest\n@pytest.mark.skip\ndef test_a(): pass\n")
    check = Check(name="tests", what="", module="pytest", options=(str(file),), smoke=(str(file),), limit_s=LIMIT_S)
    finding = run_check(check, smoke=False)
    assert (finding.outcome, "1 skipped" in finding.why) == ("failed", True)
    assert run_check(check, smoke=True).outcome == "passed", "on a CPU they are skipped"
    file.write_text("def test_a(): pass\n")
    assert run_check(check, smoke=False).outcome == "passed"


def test_a_case_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = numerics.Result((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (np.zeros(2),))
    broken, *others = numerics.cases(gpu=False)

    def compute(case: numerics.Case, *_: Any, **__: Any) -> numerics.Result:
        if case == broken:
            raise ValueError("float8 needs torchao")
        return result

    monkeypatch.setattr(numerics, "compute", compute)
    monkeypatch.setattr(numerics, "make_models", lambda _: defaultdict(Path))
    monkeypatch.setattr(numerics, "on_cpu", lambda _, calls: [result for _ in calls])
    monkeypatch.setattr(sys, "argv", ["numerics"])
    numerics.main()
    bars = {bar["name"]: bar for bar in json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bars"]}
    assert not bars[f"error_{broken}"]["ok"]
    assert all(bars[f"loss_{case}"]["ok"] for case in others)
    moe = numerics.Case("torchtitan", "qwen3_moe", "bfloat16")
    assert [bar.limit for bar in numerics.compared(moe, result, result)] == [3e-3, 6e-2]


def test_a_check_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '3600']).pid, flush=True); time.sleep(3600)"
    told: list[str] = []
    for limit_s in (1.0, 8.0, 64.0):  # a busy machine may need longer to get as far as to start the process
        run_check(_check(tmp_path, source, monkeypatch, limit_s), smoke=False, tell=told.append)
        if told[-1].strip():
            break
    with contextlib.suppress(psutil.NoSuchProcess):
        killed = psutil.Process(int(told[-1]))
        wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE, "the kernel to take it down")


def test_the_table_is_there_after_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    first = _check(tmp_path, PRINTS, monkeypatch)
    second = replace(first, name="second", module="sees_the_table")
    (tmp_path / "sees_the_table.py").write_text(f"exit('made up' not in open({str(page)!r}).read())")
    monkeypatch.setattr(gpu_check, "CHECKS", (first, second, replace(first, name="third")))
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu", "--page", str(page), "--only", "made up", "second"])
    assert "| second | failed: its last line is" in page.read_text()
    gpu_check.main(["--device", "cpu", "--page", str(page), "--only", "third", "--minutes", "0"])
    assert "| third | left out: no time was left |" in page.read_text()


def test_every_gpu_test_is_in_a_file_that_is_run() -> None:
    assert "tests/rl/weights/test_copies.py" in checks.gpu_test_files()


def test_the_page_names_the_machine_and_every_outcome() -> None:
    bar = {"name": "mfu", "value": 0.4321, "limit": 0.4, "at_most": False, "ok": True}
    findings = [Finding(CHECKS[0], "left out", "needs pytest"), Finding(CHECKS[2], "passed", "", [bar], {"peak": 1.5})]
    page = gpu_check.as_page(findings, {"gpus": ["NVIDIA H200"], "cpu": "x", "python": "3.12"}, 61.2)
    assert "on NVIDIA H200, Python 3.12, 61 s" in page
    assert "| tests | left out: needs pytest |" in page
    assert "| utilisation | passed | mfu | 0.4321 | at least 0.4 |" in page
    assert "* utilisation: peak 1.5" in page


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "gpu_names", list)
    with pytest.raises(SystemExit) as caught:
        gpu_check.main([])
    assert caught.value.code == 2
    assert "no CUDA device; --device cpu runs the checks" in capsys.readouterr().err


def test_operations_are_those_that_torch_counts() -> None:
    """Against torch's own counter on a plain layer: projections, scores over the whole square, and the head."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {name: value for name, value in utilisation.SMALL.items() if name != "num_kv_heads"}
    shape |= {"num_key_value_heads": 2, "attn_implementation": "eager", "tie_word_embeddings": True}
    config = Qwen3Config(**shape)
    with FlopCounterMode(display=False) as counter:
        logits = Qwen3ForCausalLM(config)(input_ids=torch.ones(2, 64, dtype=torch.int64)).logits
        logits.sum().backward()
    size = utilisation.Size(2, 64)
    half_of_the_scores = 3 * 2 * 2 * 4 * 32 * 2 * 64**2 / 2 * 2
    assert utilisation.operations(utilisation.SMALL, size) + half_of_the_scores == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_every_check_has_a_module() -> None:
    assert [check.name for check in CHECKS if checks.importlib.util.find_spec(check.module) is None] == []
    assert sum(check.limit_s for check in CHECKS) <= 35 * 60


@pytest.mark.slow
@pytest.mark.e2e
def test_all_of_it_runs_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gpu_check.main(["--device", "cpu", "--page", str(tmp_path / "page.md")])
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"check"')]
    assert {"numerics", "utilisation"} <= {line["check"] for line in printed}
    assert all(np.isfinite(line["value"]) for line in printed)
    assert "no GPU" in (tmp_path / "page.md").read_text()


def test_the_rehearsal_names_files_that_there_are() -> None:
    files = {word for part in PARTS for word in part.arguments if word.startswith(("tests/", "plugins/"))}
    assert len(files) >= 7
    assert [file for file in sorted(files) if not (REPOSITORY / file).exists()] == []
