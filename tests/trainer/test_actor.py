"""What one rank's actor adds to its engine."""

import os
import subprocess
import sys

import pytest

from rl.system.hardware import cpu_thread_env

_PUSHES = """
import asyncio, os, threading, torch
from tests.stores import FakeStore
from trainer.push import WeightPublisher

def num_threads_of_libgomp():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

async def main():
    weights = {name: torch.ones(512, 512) for name in "abcd"}
    torch.add(weights["a"], weights["a"])
    before = num_threads_of_libgomp()
    publisher = WeightPublisher(torch.bfloat16, "shared_memory", store=FakeStore())
    for version in (1, 2, 3):
        await publisher.publish(version, weights.items())
    print(before, num_threads_of_libgomp() - before)

asyncio.run(main())
"""


@pytest.mark.seconds
def test_a_push_computes_on_no_further_thread() -> None:
    """Each Python thread that computes has its own threads of libgomp's; too many make all wait in a worse way."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PUSHES],
        env={**os.environ, **cpu_thread_env(2)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split()[1] == "0"
