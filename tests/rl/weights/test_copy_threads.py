"""Threads that run many small tensor operations side by side, each of them alone."""

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import threading
import torch
from rl.weights.copy_threads import Workers

workers = Workers()
pairs = [(torch.zeros(2_000_000, dtype=torch.bfloat16), torch.rand(2_000_000)) for _ in range(4)]
workers.copy(pairs)
for copied, original in pairs:
    assert torch.equal(copied, original.bfloat16())

numbers, both = [], threading.Barrier(2)

def look():
    numbers.append(torch.get_num_threads())
    both.wait()

workers.run([look, look])
print(*numbers, torch.get_num_threads())
"""


@pytest.mark.seconds
def test_each_thread_uses_no_others_and_the_caller_keeps_its_own() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "2"]
