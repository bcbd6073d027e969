"""What `ownloop plan` predicts against what is measured on this machine's CPU: peak memory and time of a step.

    python -m plugins.plan.benchmarks.plan [--quick | --smoke]

Processes of their own train SmolLM2-135M in float32, all of it and a LoRA over it, on two rows of 1,024 tokens for a
step. Memory is the resident peak less that of the process before, where the C library gives each block of 64 KiB or
more pages of its own and returns them with it: the plan counts tensors, as torch's allocator on a GPU does. A run keeps
freed blocks, and so has 15 % more. Time is CPU time of one thread, so that a busy machine changes little, beside the
rate of a matrix product that is measured in the same way.

Bars: memory within 10 %, time within 25 %. `tests/controller/planning` compares memory on pretended GPUs.
"""

import ctypes
import gc
import multiprocessing
import time

import psutil

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from ownloop_plan.gpus import GPU
from ownloop_plan.memory import trainer_memory
from ownloop_plan.sizes import ModelSize
from ownloop_plan.times import Work, operations
from rl.lora import LoRAConfig
from rl.system.hf_config import read_decoder_config
from trainer.config import TrainerConfig

EFFICIENCY = 0.75
"""The share of the rate of a large product that a step of a model of this size reaches on one thread."""
CPU = GPU(memory_gib=8, operations=1, memory_rate=1, nvlink_rate=1, pcie_rate=1, network_rate=1)
"""Its 64th is the size of a chunk of logits on a CPU, 128 MiB."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def measured_memory(config: TrainerConfig, length: int, rows: int) -> int:
    """Bytes of a step's tensors, beyond what was there before the engine was built."""
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        assert libc.mallopt(option, 1 << 16), "the C library is not glibc"
    return int(measure(config, length, rows, steps=2)["bytes"])  # moments are there from the second on


def measure(config: TrainerConfig, length: int, rows: int, steps: int = 3) -> dict[str, float]:
    """Bytes beyond those before the engine was built, and the least CPU seconds of a step and of a product's rate."""
    import torch

    from rl.losses import get_loss
    from rl.tiny_models import random_batch
    from rl.types import AdamParams
    from trainer.engines import load_engine

    torch.set_num_threads(1)
    load_engine(TrainerConfig(model=config.model, compute_dtype="float32", frozen=True))  # imports, and kernels' caches
    gc.collect()
    before = psutil.Process().memory_info().rss
    base = load_engine(config)
    engine = base if config.lora is None else base.adapter("a", config.lora)
    batch, loss = random_batch((length,) * rows), get_loss("cross_entropy")
    seconds: list[float] = []
    peak = 0.0
    for _ in range(steps):
        began = time.process_time()
        engine.forward_backward([[datum] for datum in batch], loss)
        metrics = engine.optim_step(AdamParams(learning_rate=1e-5)).metrics
        seconds.append(time.process_time() - began)
        peak = max(peak, *metrics.values())
    return {"bytes": peak - before, "seconds": min(seconds), "rate": product_rate()}


def product_rate() -> float:
    """Operations of a CPU second in a product of square float32 matrices."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    taken: list[float] = []
    for _ in range(6):
        began = time.process_time()
        torch.mm(a, b)
        taken.append(time.process_time() - began)
    return 2.0 * 1024**3 / min(taken)


def main() -> None:
    """Compares, and prints the result."""
    options = parser(__doc__, quick="the same").parse_args()
    length, rows = (64, 1) if options.smoke else (1024, 2)
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    with benchmark_model(smoke=options.smoke) as model:
        size = ModelSize(read_decoder_config(model))
        for name, lora in (("full", None), ("lora", LoRAConfig(rank=32))):
            config = TrainerConfig(
                model=model, compute_dtype="float32", max_tokens_per_microbatch=length, lora=lora, num_threads=1
            )
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                found = pool.apply(measure, (config, length, rows))
                num_bytes = pool.apply(measured_memory, (config, length, rows))
            planned = trainer_memory(size, config, CPU, accumulates=rows > 1)
            work = Work(num_prompts=rows, group_size=1, prompt_tokens=0, completion_tokens=length)
            seconds = operations(size, config, work) / found["rate"] / EFFICIENCY
            predictions = {"memory": (planned.allocated, num_bytes), "time": (seconds, found["seconds"])}
            figures[f"resident_{name}"] = found["bytes"]
            for what, (predicted, measured) in predictions.items():
                limit = {"memory": 0.10, "time": 0.25}[what]
                bars.append(Bar(name=f"{what}_{name}", value=abs(predicted / measured - 1), limit=limit))
                figures |= {f"{what}_{name}_predicted": predicted, f"{what}_{name}_measured": measured}
                print(f"{name}: {what} predicted {predicted:.4g}, measured {measured:.4g}", flush=True)
    print_result("plan", bars, figures)


if __name__ == "__main__":
    main()
