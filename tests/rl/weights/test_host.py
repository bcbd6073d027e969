"""How much memory a process has left, by the files of a kernel that each test makes up."""

from pathlib import Path

import pytest

from rl.weights.host import available_memory_bytes

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
