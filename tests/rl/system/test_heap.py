"""When a process hands memory back, and that the kernel gets it."""

import os
import subprocess
import sys

import pytest

from rl.system import hardware
from rl.system.hardware import Heap, cpu_malloc_env, hand_back_if_short
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.seconds


def test_memory_that_has_grown_is_handed_back() -> None:
    settling, again = [500, 1000, 900, 950], [1500, 2000, 1800, 1900]
    sizes = [*settling, 1020, 1021, *again, 2040, 2041]
    left, handed_back = iter(sizes), list[int]()
    seen = list[int]()
    heap = Heap(lambda: seen.append(next(left)) or seen[-1], lambda: handed_back.append(seen[-1]))
    for _ in sizes:
        heap.after_step()
    assert handed_back == [1021, 2041]  # 2 % above the most of four steps, 1000 and then 2000


@pytest.mark.parametrize(
    ("resident", "available", "expected"), [(8, 0.9, 1), (8, 1.1, 0), (0.9, 0.0, 0)], ids=["short", "enough", "small"]
)
def test_a_host_with_little_left_gets_memory_back_between_rows(
    resident: float, available: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_back = list[int]()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setattr(hardware, "_resident_bytes", lambda: int(resident * 2**30))
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: int(available * 2**30))
    monkeypatch.setattr(hardware, "hand_back_memory", lambda: handed_back.append(1))
    hand_back_if_short()
    assert len(handed_back) == expected


HOLES = """
import torch
from rl.system.hardware import Heap, _resident_bytes
heap = Heap()
for _ in range(4):
    heap.after_step()
kept, held = [], []
for _ in range(64):  # 256 MB that are freed, in holes between what is kept
    held.append(torch.ones(1 << 20))
    kept.append(torch.ones(1 << 10))
before = _resident_bytes()
held.clear()
between = _resident_bytes()
heap.after_step()
print(before - between, between - _resident_bytes())
"""


def test_what_malloc_keeps_goes_back_to_the_kernel() -> None:
    env = {**os.environ, **cpu_malloc_env()}
    done = subprocess.run(
        [sys.executable, "-c", HOLES], env=env, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    kept_by_malloc, handed_back = map(int, done.stdout.split())
    assert kept_by_malloc < 64 << 20
    assert handed_back > 192 << 20


ARENAS = """
import ctypes, sys, threading
from rl.system.hardware import keep_few_arenas
if sys.argv[1] == "few":
    keep_few_arenas()
all_run = threading.Barrier(17)
kept = []
threads = [threading.Thread(target=lambda: (kept.append(bytes(600)), all_run.wait())) for _ in range(16)]
for thread in threads:
    thread.start()
all_run.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(stream := libc.fdopen(1, b"w")))
libc.fflush(ctypes.c_void_p(stream))
"""


@pytest.mark.parametrize(("arenas", "expected"), [("few", range(1, 3)), ("default", range(3, 99))])
def test_threads_share_two_arenas(arenas: str, expected: range) -> None:
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", ARENAS, arenas]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.count("<heap nr") in expected
