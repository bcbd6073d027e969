"""A push and a pull between two processes on one GPU or two, against one copy within a GPU.

    python -m benchmarks.gpu.weights [--smoke]

A process with float32 weights of Qwen3-1.7B's shapes pushes them in bfloat16, as a trainer does; this process copies
each tensor of the version into one of its own, as a generator does from its second pull on. They are on different GPUs
if there are two. A push reads float32 and writes bfloat16, so push and pull move at least 2.5 times the bytes of a
copy, and hundreds of tensors cost some milliseconds of Python: a larger model has a lower ratio. `--smoke` pushes small
weights, on the CPU through shared memory.
"""

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.utilisation import SHAPE, SMALL
from benchmarks.harness import Bar, parser, print_result
from rl.weights.shared_memory import Pair, Workers, copy
from rl.weights.version import VersionRecord, load_transport
from trainer.engines.contract.reference import LocalStore
from trainer.push import WeightPublisher

Shapes = Sequence[tuple[str, tuple[int, ...]]]


def shapes(shape: Mapping[str, Any]) -> Shapes:
    """The weight matrices of a Qwen3, by any name."""
    d, wide, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_kv_heads"]
    layer = {
        "q": (queries, d),
        "k": (keys, d),
        "v": (keys, d),
        "o": (d, queries),
        "gate": (wide, d),
        "up": (wide, d),
        "down": (d, wide),
        "norm_1": (d,),
        "norm_2": (d,),
        "q_norm": (head,),
        "k_norm": (head,),
    }
    layers = [(f"{i}.{name}", size) for i in range(shape["num_hidden_layers"]) for name, size in layer.items()]
    return [("embedding", (shape["vocab_size"], d)), *layers, ("norm", (d,))]


def push_when_asked(pipe: "Connection[Any, Any]", tensors: Shapes, transport: str) -> None:
    """The trainer: changes the weights and pushes them, until the other end closes."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    weights = {name: torch.randn(size, device=device) for name, size in tensors}
    publisher = WeightPublisher(torch.bfloat16, transport, store=LocalStore())
    asyncio.run(_push(pipe, publisher, weights))


async def _push(pipe: "Connection[Any, Any]", publisher: WeightPublisher, weights: Mapping[str, torch.Tensor]) -> None:
    """All in one event loop, as a trainer has one; a new one takes milliseconds."""
    version = 0
    with contextlib.suppress(EOFError):
        while pipe.recv():
            version += 1
            for tensor in weights.values():
                tensor.add_(1)
            if torch.cuda.is_available():
                torch.cuda.synchronize(weights["norm"].device)
            begin = time.perf_counter()
            record = await publisher.publish(version, weights.items())
            pipe.send((record, time.perf_counter() - begin, float(weights["norm"][0])))


class Puller:
    """The generator."""

    def __init__(self, transport: str, device: torch.device) -> None:
        """Takes no memory yet: the tensors are made at the first pull."""
        self._receiver = load_transport(transport).receiver(lambda value=None: value)
        self._device = device
        self._pairs: dict[int, list[Pair]] = {}
        self._workers = Workers()
        self.tensors: dict[str, torch.Tensor] = {}

    def pull(self, record: VersionRecord) -> float:
        """Seconds of a pull, the checks of the transport included."""
        begin = time.perf_counter()
        with self._receiver.open(record, None) as memory:
            if not self.tensors:
                sizes = {spec.name: spec for spec in record.manifest}
                self.tensors = {n: torch.zeros(s.shape, dtype=s.dtype, device=self._device) for n, s in sizes.items()}
            pairs = self._pairs.get(id(memory))
            if pairs is None:
                pairs = [(self.tensors[spec.name], memory.tensor(spec)) for spec in record.manifest]  # pyright: ignore
                self._pairs[id(memory)] = pairs
            (copy if self._device.type == "cuda" else self._workers.copy)(pairs)
        return time.perf_counter() - begin


def seconds_of_copy(num_bytes: int, device: torch.device) -> float:
    """How long a copy within the device takes, the median of nine."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds: list[float] = []
    for _ in range(10):
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def main() -> None:
    """Runs the benchmark and prints its result."""
    options = parser(__doc__, quick="as without").parse_args()
    on_gpu = torch.cuda.is_available()
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    transport = "gpu_memory" if on_gpu else "shared_memory"
    tensors = shapes(SMALL if options.smoke else SHAPE)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    os.environ["LOCAL_RANK"] = str(min(1, num_gpus - 1)) if on_gpu else "0"  # the trainer's, which inherits it
    trainer = context.Process(target=push_when_asked, args=(theirs, tensors, transport), daemon=True)
    trainer.start()
    os.environ["LOCAL_RANK"] = "0"
    theirs.close()
    puller, rounds = Puller(transport, device), []
    for _ in range(3 if options.smoke else 12):
        pipe.send(True)
        record, push, expected = pipe.recv()
        rounds.append((push, puller.pull(record)))
        found = float(puller.tensors["norm"][0])
        assert found == float(torch.tensor(expected).bfloat16()), f"pulled {found}, pushed {expected}"
    pipe.close()
    trainer.join()
    num_bytes = sum(tensor.nbytes for tensor in puller.tensors.values())
    push, pull = (statistics.median(part) for part in zip(*rounds[2:], strict=True))  # two buffers are opened first
    copy = seconds_of_copy(num_bytes, device)
    print(f"push {1e3 * push:.2f} ms, pull {1e3 * pull:.2f} ms, one copy {1e3 * copy:.2f} ms", flush=True)
    print_result(
        "gpu_weights",
        [Bar(name="ratio_to_copy", value=(push + pull) / copy, limit=5.0)],
        {
            "megabytes": num_bytes / 1e6,
            "gpus": num_gpus,
            "transport": transport,
            "seconds_push": push,
            "seconds_pull": pull,
            "seconds_copy": copy,
        },
    )


if __name__ == "__main__":
    main()
