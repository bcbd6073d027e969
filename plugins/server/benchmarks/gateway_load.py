"""Many clients at once for a long time: requests that are lost, doubled or reordered, and memory that grows.

    python -m plugins.server.benchmarks.gateway_load [--quick | --smoke] [--minutes N]

A server of a tiny random model with 8 training clients, of which one floods, and 64 sampling clients, for ten minutes.
The clients use the official SDK, in this process. Bars:

* `lost`: calls without a result. `doubled_or_reordered`: optimizer steps whose number is not that of the call, and
  samples that answer another request.
* `megabytes_per_minute`: growth of the server's own process after the first third; `..._all` is that of all of them.
  Results are kept for two minutes, so that runs of less than eight minutes show those, too.
* `unfairness`: the slowest polite training client to their median, in seconds per step.
"""

import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from ownloop_server.child_server import Server, served
from plugins.server.benchmarks.gateway import as_tinker, at_once, new_client
from rl.types import Datum

if TYPE_CHECKING:
    from tinker import TrainingClient

NUM_TRAINING = 8
NUM_SAMPLING = 64
VOCABULARY = 64
Look = tuple[float, float, float]
"""Minutes, and resident megabytes of the server's own process and of all."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one minute")
    options_parser.add_argument("--minutes", type=float, default=10, help="length of the run")
    options = options_parser.parse_args()
    minutes = 0.1 if options.smoke else 1.0 if options.quick else options.minutes
    with benchmark_model(smoke=True) as model, tempfile.TemporaryDirectory() as folder:
        float32 = ("--trainer.compute-dtype", "float32", "--generator.dtype", "float32")
        with served(model, Path(folder), *float32, "--generator.max-model-len", "128") as server:
            load = Load(server, minutes)
            load.run()
            looks = load.looks
    figures = load.figures() | {
        "megabytes_per_minute": slope([(at, own) for at, own, _ in looks]),
        "megabytes_per_minute_all": slope([(at, total) for at, _, total in looks]),
        "megabytes_at_the_end": looks[-1][1],
        "megabytes_at_the_end_all": looks[-1][2],
        "minutes": minutes,
    }
    limits = {"lost": 0, "doubled_or_reordered": 0, "unfairness": 2, "megabytes_per_minute": 1}
    bars = [Bar(name=name, value=figures[name], limit=limit) for name, limit in limits.items()]
    for bar in bars:
        print(f"{bar.name:<24}{bar.value:8.3f}")
    print_result("gateway_load", bars, figures)


class Load:
    """The clients, and what they have counted."""

    def __init__(self, server: Server, minutes: float) -> None:
        """`minutes` is how long they go on to begin requests."""
        self.looks: list[Look] = []
        self._server = server
        self._minutes = minutes
        self._ends = 0.0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._steps = [0] * NUM_TRAINING
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 33)
        self._batch = [as_tinker(Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:]}))]

    def run(self) -> None:
        """Returns when every request has its result."""
        import tinker

        clients = [new_client(self._server) for _ in range(NUM_TRAINING)]
        services = [tinker.ServiceClient(base_url=self._server.url, api_key="tml-local") for _ in range(NUM_SAMPLING)]
        samplers = [service.create_sampling_client(base_model=str(self._server.model)).result() for service in services]
        began = time.monotonic()
        self._ends = began + 60 * self._minutes
        calls: list[Callable[[], object]] = [lambda: self._watch(began), lambda: self._flood(clients[0])]
        calls += [lambda i=i: self._train(i, clients[i]) for i in range(1, NUM_TRAINING)]
        calls += [lambda i=i, sampler=sampler: self._sample(i, sampler) for i, sampler in enumerate(samplers)]
        at_once(calls)

    def figures(self) -> dict[str, float]:
        """What happened."""
        seconds = [60 * self._minutes / max(steps, 1) for steps in self._steps[1:]]
        return {
            **{name: float(self._counts[name]) for name in ("requests", "lost", "doubled_or_reordered")},
            "flooding_steps": float(self._steps[0]),
            "polite_steps": float(sum(self._steps[1:])),
            "samples": float(self._counts["samples"]),
            "unfairness": max(seconds) / statistics.median(seconds),
        }

    def _count(self, **events: int) -> None:
        with self._lock:
            self._counts.update(events)

    def _flood(self, client: "TrainingClient") -> None:
        """Sends without waiting: hundreds of calls are always on their way."""
        futures: list[Any] = []
        while time.monotonic() < self._ends:
            futures += [self._begin_step(client) for _ in range(20)]
            while len(futures) > 100:
                self._finish_step(0, futures.pop(0))
        for future in futures:
            self._finish_step(0, future)

    def _train(self, index: int, client: "TrainingClient") -> None:
        """Waits for every step, and now and then makes a sampling client of its weights and uses it."""
        while time.monotonic() < self._ends:
            self._finish_step(index, self._begin_step(client))
            if self._steps[index] % 10 == 0:
                self._sample_trained(index, client)

    def _sample_trained(self, index: int, client: "TrainingClient") -> None:
        """Makes a sampling client of what was trained, and uses it."""
        from tinker import types

        try:
            sampler = client.save_weights_and_get_sampling_client().result(timeout=300)
            output = sampler.sample(types.ModelInput.from_ints([3, 4]), 1, types.SamplingParams(max_tokens=2))
            self._count(requests=2, lost=int(not output.result(timeout=300).sequences))
        except Exception as error:
            print(f"training client {index}: {type(error).__name__}: {error}", flush=True)
            self._count(requests=2, lost=1)

    def _begin_step(self, client: "TrainingClient") -> tuple[Any, object]:
        from tinker import types

        gradient = client.forward_backward(self._batch, "cross_entropy")
        return gradient, client.optim_step(types.AdamParams(learning_rate=1e-5))

    def _finish_step(self, index: int, futures: tuple[Any, Any]) -> None:
        """A step without a gradient, before its gradient, is an error of the server's; so is a number used twice."""
        try:
            gradient, step = (future.result(timeout=300) for future in futures)
        except Exception as error:
            print(f"training client {index}: {type(error).__name__}: {error}", flush=True)
            self._count(requests=2, lost=1)
            return
        self._steps[index] += 1
        wrong = int(step.metrics["policy_version"]) != self._steps[index] or len(gradient.loss_fn_outputs) != 1
        self._count(requests=2, doubled_or_reordered=int(wrong))

    def _sample(self, index: int, sampler: Any) -> None:
        """Every request has a prompt and a length of its own, so that an answer to another one is seen."""
        from tinker import types

        numbers = random.Random(index)
        while time.monotonic() < self._ends:
            prompt = [numbers.randrange(3, VOCABULARY) for _ in range(numbers.randint(2, 40))]
            length = numbers.randint(1, 16)
            params = types.SamplingParams(max_tokens=length, stop=[], seed=index)
            try:
                output = sampler.sample(
                    types.ModelInput.from_ints(prompt), 1, params, include_prompt_logprobs=True
                ).result(timeout=300)
            except Exception as error:
                print(f"sampling client {index}: {type(error).__name__}: {error}", flush=True)
                self._count(requests=1, lost=1)
                continue
            wrong = len(output.sequences[0].tokens) != length or len(output.prompt_logprobs) != len(prompt)
            self._count(requests=1, samples=1, doubled_or_reordered=int(wrong))
            time.sleep(numbers.random() * 0.5)

    def _watch(self, began: float) -> None:
        """Looks at the memory of the server's processes until the end."""
        server = psutil.Process(self._server.process.pid)
        while time.monotonic() < self._ends:
            own = server.memory_info().rss
            others = sum(child.memory_info().rss for child in server.children(recursive=True))
            self.looks.append(((time.monotonic() - began) / 60, own / 1e6, (own + others) / 1e6))
            print(f"{self.looks[-1][0]:5.2f} min {self.looks[-1][1]:8.1f} MB {dict(self._counts)}", flush=True)
            time.sleep(min(5.0, 6 * self._minutes))


def slope(points: list[tuple[float, float]]) -> float:
    """Growth per unit after the first third, by least squares."""
    late = points[len(points) // 3 :]
    return float(np.polyfit([x for x, _ in late], [y for _, y in late], 1)[0]) if len(late) > 1 else 0.0


if __name__ == "__main__":
    main()
