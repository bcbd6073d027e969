"""When a trainer hands memory back, and that the kernel gets it."""

import os
import subprocess
import sys

from rl.hardware import cpu_malloc_env
from trainer.heap import Heap


def test_memory_is_handed_back_once_it_has_grown_and_measured_anew() -> None:
    settling, again = [500, 1000, 900, 950], [1500, 2000, 1800, 1900]
    sizes = [*settling, 1020, 1021, *again, 2040, 2041]
    left, handed_back = iter(sizes), list[int]()
    seen = list[int]()
    heap = Heap(lambda: seen.append(next(left)) or seen[-1], lambda: handed_back.append(seen[-1]))
    for _ in sizes:
        heap.after_step()
    assert handed_back == [1021, 2041]  # 2 % above the most of four steps, 1000 and then 2000


HOLES = """
import torch
from trainer.heap import Heap, _resident_bytes
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
    done = subprocess.run([sys.executable, "-c", HOLES], env=env, capture_output=True, text=True, check=True)
    kept_by_malloc, handed_back = map(int, done.stdout.split())
    assert kept_by_malloc < 64 << 20
    assert handed_back > 192 << 20
