"""How many kernels an optimizer step and a push launch, and how long the host takes for a push.

    python -m tests.gpu_pretended.launches

It is run in the mode `kernels` (`pretended.py`): kernels are launched into nothing, so all seconds are the host's. The
tensors are as many as a Qwen3-1.7B has, and narrow. Prints one JSON object.
"""

import asyncio
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.utilisation import SHAPE
from benchmarks.gpu.weights import shapes
from rl.types import AdamParams
from trainer.engines.contract.reference import LocalStore
from trainer.engines.pytorch.optimizer import Optimizer
from trainer.push import WeightPublisher

NARROW = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "head_dim": 16}
WARM_UP, MEASURED = 10, 41
MOST = {"kernels_step": 40, "kernels_push": 10}
"""Of 310 tensors: that none of them has a kernel of its own."""


def launched(do: Callable[[], object]) -> int:
    """The kernels that are launched meanwhile."""
    count = ctypes.CDLL(None).pretended_gpu_launches
    count.restype = ctypes.c_long
    before = count()
    do()
    return count() - before


def main() -> int:
    """Counts. Exits with 1 if there are too many kernels."""
    named = {name: torch.nn.Parameter(torch.zeros(size, device="cuda")) for name, size in shapes(NARROW)}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = Optimizer(named)
    publisher, loop = WeightPublisher(torch.bfloat16, "gpu_memory", store=LocalStore()), asyncio.new_event_loop()
    versions, seconds = itertools.count(), list[float]()

    def step() -> None:
        optimizer.step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0), grad_scale=0.5)

    def push() -> None:
        begin = time.perf_counter()
        loop.run_until_complete(publisher.publish(next(versions), named.items()))
        seconds.append(time.perf_counter() - begin)

    for _ in range(WARM_UP):
        step()
    kernels = {"kernels_step": launched(step)}
    for _ in range(WARM_UP + MEASURED):
        push()
    kernels["kernels_push"] = launched(push)
    found = {"tensors": len(named), **kernels, "ms_push": round(1e3 * statistics.median(seconds[WARM_UP:]), 2)}
    print(json.dumps(found), flush=True)
    return int(any(found[name] > most for name, most in MOST.items()))


if __name__ == "__main__":
    sys.exit(main())
