"""What benchmarks share that run an engine in their own process."""

import os
import statistics
import sys
import time


def become_trainer_process(module: str, threads: int) -> None:
    """Gives this process what a trainer process has. glibc reads its part at the start, so the process starts again.

    `module` is the one that runs as a script.
    """
    from trainer.config import TrainerConfig, trainer_env

    wanted = trainer_env(TrainerConfig(num_threads=threads))
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **wanted})


def matrix_rate(hidden_size: int, intermediate_size: int) -> float:
    """Operations a second of a layer's largest product over 2,048 tokens, in the dtype that this CPU is fast in."""
    import torch

    from rl.system.hardware import cpu_dtype

    dtype: torch.dtype = getattr(torch, cpu_dtype())
    hidden = torch.randn(2048, hidden_size).to(dtype)
    weight = torch.randn(intermediate_size, hidden_size).to(dtype)
    taken: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(hidden, weight)
        taken.append(time.perf_counter() - start)
    return 2 * hidden.numel() * len(weight) / statistics.median(taken)
