"""Whole runs in processes of their own on processors that are pretended: no mismatch, by the kernels for these."""

from pathlib import Path

import pytest

from ownloop_bitwise.library import instruction_set
from tests.e2e.cli_runs import metric_rows, ownloop

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = str(Path(__file__).with_name("tiny_bitwise.py"))
CPUS = {
    "own": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cpu", CPUS)
def test_a_run_has_no_mismatch(cpu: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CPUS[cpu], "OWNLOOP_TINY_LOOP": "ppo", "OWNLOOP_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    dtypes = ("--trainer.compute-dtype", dtype, "--generator.dtype", dtype)
    run = ownloop(tmp_path, RECIPE, "--name", "run", "--num-steps", "4", *dtypes)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    steps = [row for row in metric_rows(tmp_path / "runs" / "run") if "grad_norm" in row]
    assert [row["logprob_mismatch_max"] for row in steps] == [0.0] * 4
    (library,) = (tmp_path / "cache" / "bitwise").glob("*.so")
    assert library.name.startswith(f"kernels-{instruction_set()}-")
