"""The dtype that a CPU computes fast, from the list of features as Linux prints it; how its threads wait; GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.grpo_smollm2_cpu import recipe
from rl.system import hardware
from rl.system.hardware import available_memory_bytes, cpu_dtype, cpu_thread_env
from tests.waiting import wait_for_end


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16\n", "bfloat16"),
        ("processor : 0\nflags\t\t: fpu sse avx2 avx512_bf16\n", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags\t\t: avx2 avx512_bf16 avx512_fp16 amx_bf16\n", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags\t\t: avx2 avx512_bf16 avx512_fp16\n", "float32"),
        ("vendor_id : AuthenticAMD\nflags\t\t: avx2 avx512_bf16 avx512_fp16\n", "bfloat16"),
        ("processor : 0\nflags\t\t: fpu sse avx2 f16c fma\n", "float32"),
        ("processor : 0\nflags\t\t: fpu sse avx2 avx512f avx512bw avx512vl avx512dq\n", "float32"),
        ("processor : 0\nFeatures\t: fp asimd asimddp bf16 i8mm\n", "bfloat16"),
        ("processor : 0\nFeatures\t: fp asimd asimddp\n", "float32"),
        ("", "float32"),
    ],
)
def test_bfloat16_only_where_the_processor_is_fast_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, dtype: str
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert cpu_dtype(file) == dtype


@pytest.mark.parametrize(
    ("cpuinfo", "cap", "dtype"),
    [
        ("flags\t\t: avx2 avx512_bf16\n", "AVX2", "float32"),
        ("flags\t\t: avx2 avx512_bf16\n", "avx512_core", "float32"),
        ("flags\t\t: avx2 avx512_bf16\n", "AVX512_CORE_BF16", "bfloat16"),
        ("flags\t\t: avx2 avx512_bf16\n", "ALL", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags\t\t: avx512_bf16 avx512_fp16 amx_bf16\n", "AVX512_CORE_BF16", "float32"),
        ("vendor_id : GenuineIntel\nflags\t\t: avx512_bf16 avx512_fp16 amx_bf16\n", "AVX512_CORE_AMX", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags\t\t: avx512_bf16 avx512_fp16 amx_bf16\n", "DEFAULT", "bfloat16"),
    ],
)
def test_what_keeps_onednn_from_instructions_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, cap: str, dtype: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    assert cpu_dtype(file) == dtype


def test_float32_where_the_features_cannot_be_read(tmp_path: Path) -> None:
    assert cpu_dtype(tmp_path / "missing") == "float32"


def test_the_recipe_computes_generates_and_pushes_in_one_dtype() -> None:
    config = recipe()
    assert config.trainer.compute_dtype == config.generator.dtype == cpu_dtype()


def test_a_build_for_cpus_is_not_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(hardware, "version", {"torch": "2.13.0+cpu"}.__getitem__)
    assert not hardware.sees_gpu()
    assert "torch" not in sys.modules
    monkeypatch.setattr(hardware, "version", {"torch": "2.13.0"}.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not hardware.is_cpu_build()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.is_cpu_build(), "the variable hides every GPU"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(hardware, "version", {"torch": "2.13.0+cpu"}.__getitem__)
    assert hardware.sees_gpu(), "torch is loaded, so it can be asked"


def test_libgomp_understands_its_settings() -> None:
    """With OMP_DISPLAY_ENV it prints what it has parsed: one line for each variable, NAME = 'VALUE'."""
    expected = cpu_thread_env(3)
    code = "import torch; torch.ones(200_000).add_(1)"
    env = {**os.environ, **expected, "OMP_DISPLAY_ENV": "VERBOSE"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status, _, errors = wait_for_end(process, "a parallel loop")
    assert status == 0, errors
    parsed = dict(re.findall(r"(\w+) = '(.*)'", errors))
    assert {name: parsed.get(name) for name in expected} == expected


def test_versions_are_those_of_the_packages_that_are_installed() -> None:
    assert re.fullmatch(r"ownloop [\d.]+, torch 2\.[^,]+, .*, Python 3\.1[12]\.\d+", hardware.describe_software())


V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "25 21 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
GIB = 1 << 30


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {8 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _group_2(group: str, limit: str, used: int, file: int = 0) -> dict[str, str]:
    stat = f"anon {used - file}\nfile {file}\ninactive_file {file // 2}\nactive_file {file // 2}\nslab_reclaimable 0\n"
    return {f"{group}/memory.max": limit, f"{group}/memory.current": str(used), f"{group}/memory.stat": stat}


def _group_1(group: str, limit: int, used: int, file: int = 0) -> dict[str, str]:
    stat = f"inactive_file 7\ntotal_inactive_file {file // 2}\ntotal_active_file {file // 2}\n"
    files = {"limit_in_bytes": str(limit), "usage_in_bytes": str(used), "stat": stat}
    return {f"{group}/memory.{name}": text for name, text in files.items()}


def test_without_a_control_group_it_is_the_hosts_estimate(tmp_path: Path) -> None:
    assert available_memory_bytes(_write(tmp_path, {})) == 8 * GIB


@pytest.mark.parametrize("limited", ["slice", "slice/run", "slice/run/deeper"])
def test_the_tightest_of_its_group_and_the_parents_counts(tmp_path: Path, limited: str) -> None:
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/slice/run/deeper\n"}
    files |= _group_2("sys/fs/cgroup/slice", "max", 6 * GIB) | _group_2("sys/fs/cgroup/slice/run", "max", 5 * GIB)
    files |= _group_2("sys/fs/cgroup/slice/other", str(GIB), GIB)  # not one of ours, and full
    files |= _group_2(f"sys/fs/cgroup/{limited}", str(7 * GIB), 4 * GIB)
    assert available_memory_bytes(_write(tmp_path, files)) == 3 * GIB


def test_what_the_page_cache_holds_is_not_used(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/run\n"}
    files |= _group_2("sys/fs/cgroup/run", str(4 * GIB), 4 * GIB, file=3 * GIB)
    assert available_memory_bytes(_write(tmp_path, files)) == 3 * GIB


def test_groups_of_version_1(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V1 + V2.replace("cgroup ", "cgroup/unified ", 1)}
    files["proc/self/cgroup"] = "5:cpu,cpuacct:/elsewhere\n4:memory:/jobs/42\n0::/\n"
    files |= _group_1("sys/fs/cgroup/memory", (1 << 63) - 4096, 9 * GIB)  # no limit
    files |= _group_1("sys/fs/cgroup/memory/jobs", 6 * GIB, 5 * GIB, file=GIB)
    files |= _group_1("sys/fs/cgroup/memory/jobs/42", 5 * GIB, 2 * GIB)
    assert available_memory_bytes(_write(tmp_path, files)) == 2 * GIB


def test_a_container_that_has_only_its_own_group_mounted(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V1.replace(" / ", " /docker/abc ", 1), "proc/self/cgroup": "4:memory:/docker/abc\n"}
    files |= _group_1("sys/fs/cgroup/memory", 3 * GIB, 2 * GIB)
    assert available_memory_bytes(_write(tmp_path, files)) == GIB


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/run\n"}
    files |= _group_2("sys/fs/cgroup/run", str(GIB), 2 * GIB)
    assert available_memory_bytes(_write(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("limits", "expected"), [((64, 4096), "1024 4096"), ((64, 512), "512 512"), ((2048, 4096), "2048 4096")]
)
def test_a_low_limit_of_open_files_is_raised(limits: tuple[int, int], expected: str) -> None:
    assert limited(*limits) == expected


def test_too_few_open_files_are_refused() -> None:
    assert limited(64, 64) == "the limit of open files (ulimit -n) is 64; a run needs at least 256"


def limited(soft: int, hard: int) -> str:
    """What becomes of these limits in a process of its own, or the error."""
    code = (
        "import resource as r\nfrom rl.system.hardware import allow_open_files\n"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "try:\n    allow_open_files()\n    print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
        "except ValueError as error:\n    print(error)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
