"""What the Tinker door costs: an optimizer step through SDK and gateway beside the same step in a controller script.

    python -m plugins.server.benchmarks.gateway [--quick | --smoke] [--rounds N] [--threads N]

A server and a controller script, each with a trainer and a generator of SmolLM2 of its own, take turns. A step samples
groups, computes the gradient of `importance_sampling`, applies it to an adapter of rank 32 and hands the new weights to
the generator. Bars:

* `step_ratio`: the median step through SDK and gateway to the median step of the script.
* `unfairness`: beside a client that floods the server with requests, the slowest of seven polite clients to their
  median, in seconds per step.
* `first_byte_ms`: from a request that has nothing to compute to the first byte of its result, the median of 200.
"""

import argparse
import asyncio
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from ownloop_server.child_server import Server, served
from rl.lora import LoRAConfig
from rl.system.hardware import cpu_dtype
from rl.types import AdamParams, Datum, SamplingParams

if TYPE_CHECKING:  # they load torch, Monarch and vLLM
    from rl.protocols import Generator, Trainer

RANK = 32
NUM_POLITE = 7
RATE = 1e-5


@dataclass(frozen=True, slots=True)
class Size:
    """How much work there is."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    """Steps of each side after a warm-up step."""
    fair_s: float
    """Seconds for which clients compete."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds of shorter texts, 10 seconds of competing clients")
    options_parser.add_argument("--rounds", type=int, default=10, help="steps of each side, after a warm-up step")
    options_parser.add_argument("--threads", type=int, default=1, help="of each process")
    options = options_parser.parse_args()
    if options.smoke:
        size = Size(prompts=2, group=2, prompt_tokens=8, new_tokens=4, rounds=1, fair_s=1)
    elif options.quick:
        size = Size(prompts=4, group=4, prompt_tokens=32, new_tokens=16, rounds=3, fair_s=10)
    else:
        size = Size(prompts=8, group=4, prompt_tokens=64, new_tokens=32, rounds=options.rounds, fair_s=60)
    with benchmark_model(smoke=options.smoke) as model, tempfile.TemporaryDirectory() as folder:
        dtype = cpu_dtype()
        threads = ["--trainer.num-threads", str(options.threads), "--generator.num-threads", str(options.threads)]
        lengths = ["--generator.max-model-len", "256", "--trainer.compute-dtype", dtype, "--generator.dtype", dtype]
        with served(model, Path(folder) / "server", *threads, *lengths) as server:
            figures = asyncio.run(measure_steps(server, options, size, Path(folder)))
            figures |= measure_first_byte(server, 10 if options.smoke else 200)
            figures |= measure_fairness(server, size)
    bars = [
        Bar(name="step_ratio", value=figures["step_ratio"], limit=1.15),
        Bar(name="unfairness", value=figures["unfairness"], limit=2),
        Bar(name="first_byte_ms", value=figures["first_byte_ms"], limit=20),
    ]
    for bar in bars:
        print(f"{bar.name:<18}{bar.value:8.3f}")
    print_result("gateway", bars, {**figures, "rank": RANK, "threads": options.threads, "dtype": dtype})


async def measure_steps(server: Server, options: argparse.Namespace, size: Size, folder: Path) -> dict[str, float]:
    """Seconds per step of both sides, which take turns."""
    seconds: dict[str, list[float]] = {"gateway": [], "script": []}
    vocabulary = vocab_size(server.model)
    async with script(server.model, options.threads, folder / "script") as (trainer, generator):
        client = await asyncio.to_thread(new_client, server)
        for turn in range(1 + size.rounds):
            prompts = np.random.default_rng(turn).integers(0, vocabulary, (size.prompts, size.prompt_tokens)).tolist()
            for side in seconds if turn % 2 else reversed(seconds):
                begin = time.perf_counter()
                if side == "script":
                    await step_of_script(trainer, generator, prompts, size)
                else:
                    await asyncio.to_thread(step_of_client, client, prompts, size)
                if turn:
                    seconds[side].append(time.perf_counter() - begin)
                print(f"{side:<8} step {turn}: {time.perf_counter() - begin:6.2f} s", flush=True)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "step_ratio": median["gateway"] / median["script"],
        **{f"seconds_per_step_{side}": value for side, value in median.items()},
    }


@asynccontextmanager
async def script(model: Path, threads: int, logs: Path) -> "AsyncGenerator[tuple[Trainer, Generator]]":
    """A controller script's own trainer of an adapter, and its generator, with the server's options."""
    from controller.launching.launcher import launch  # importing Monarch configures it for this process
    from generator.config import GeneratorConfig, LoRALimits
    from trainer.config import TrainerConfig

    dtype = cpu_dtype()
    training = TrainerConfig(compute_dtype=dtype, num_threads=threads, lora=LoRAConfig(rank=RANK))
    serving = GeneratorConfig(dtype=dtype, num_threads=threads, max_model_len=256, max_num_seqs=128)
    serving = replace(serving, lora=LoRALimits(max_rank=RANK, max_adapters=8, max_loaded=24))
    async with launch(model, training, serving, logs) as (trainer, generator):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        yield trainer, generator


async def step_of_script(
    trainer: "Trainer", generator: "Generator", prompts: Sequence[Sequence[int]], size: Size
) -> None:
    """One step with the trainer's and the generator's handles."""
    sampling = SamplingParams(max_tokens=size.new_tokens, ignore_eos=True)
    groups = await asyncio.gather(*(generator.generate(prompt, sampling, size.group) for prompt in prompts))
    batch = [
        _datum(prompt, sample.tokens, sample.logprobs, index)
        for prompt, group in zip(prompts, groups, strict=True)
        for index, sample in enumerate(group)
    ]
    gradient = trainer.forward_backward(batch, "importance_sampling")
    await asyncio.gather(gradient, trainer.optim_step(AdamParams(learning_rate=RATE)))  # in this order
    await generator.pull_model_state_dict(await trainer.push_model_state_dict())


def step_of_client(client: Any, prompts: Sequence[Sequence[int]], size: Size) -> None:
    """The same step with the SDK."""
    from tinker import types

    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=size.new_tokens, stop=[])
    futures = [sampler.sample(types.ModelInput.from_ints(list(prompt)), size.group, params) for prompt in prompts]
    batch = [
        as_tinker(_datum(prompt, sequence.tokens, sequence.logprobs, index))
        for prompt, future in zip(prompts, futures, strict=True)
        for index, sequence in enumerate(future.result().sequences)
    ]
    gradient = client.forward_backward(batch, "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=RATE)).result()
    gradient.result()


def measure_first_byte(server: Server, count: int) -> dict[str, float]:
    """Milliseconds from a request that is refused without work, to the first byte of its result."""
    run = new_client(server).model_id
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)

    def post(path: str, body: dict[str, object]) -> bytes:
        headers = {"Content-Type": "application/json", "X-API-Key": "tml-local"}
        connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
        return connection.getresponse().read()

    times: list[float] = []
    for number in range(1, count + 1):
        begin = time.perf_counter()
        accepted = json.loads(post("save_weights", {"model_id": run, "seq_id": number, "path": "/"}))
        result = post("retrieve_future", {"request_id": accepted["request_id"]})
        times.append(time.perf_counter() - begin)
        assert b"must start with a letter" in result, result
    return {"first_byte_ms": 1e3 * statistics.median(times), "first_byte_slowest_ms": 1e3 * max(times)}


def measure_fairness(server: Server, size: Size) -> dict[str, float]:
    """Seconds per step of polite clients beside one that floods."""
    ends = time.perf_counter() + size.fair_s
    tokens = np.random.default_rng(0).integers(0, vocab_size(server.model), size.prompt_tokens + 1)
    batch = [as_tinker(Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:]}))]
    clients = [new_client(server) for _ in range(NUM_POLITE + 1)]
    steps = [0] * len(clients)

    def polite(index: int) -> None:
        while time.perf_counter() < ends or not steps[index]:
            one_step(clients[index], batch)
            steps[index] += 1

    def flooding(index: int) -> None:
        futures: list[Any] = []
        while time.perf_counter() < ends:
            futures += [clients[index].forward_backward(batch, "cross_entropy") for _ in range(20)]
            while len(futures) > 200:
                futures.pop(0).result()
                steps[index] += 1
        for future in futures:
            future.result()

    begin = time.perf_counter()
    at_once([lambda index=index: (polite if index < NUM_POLITE else flooding)(index) for index in range(len(clients))])
    seconds = [(time.perf_counter() - begin) / max(count, 1) for count in steps[:NUM_POLITE]]
    return {
        "unfairness": max(seconds) / statistics.median(seconds),
        "polite_seconds_per_step": statistics.median(seconds),
        "flooding_calls": steps[-1],
    }


def one_step(client: Any, batch: Sequence[Any]) -> int:
    """Gradient and optimizer step of one batch. Returns the version that the step made."""
    from tinker import types

    gradient = client.forward_backward(batch, "cross_entropy")
    version = client.optim_step(types.AdamParams(learning_rate=RATE)).result().metrics["policy_version"]
    gradient.result()
    return int(version)


def new_client(server: Server) -> Any:
    """A training client of a new adapter, in a session of its own."""
    import tinker

    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    return service.create_lora_training_client(str(server.model), rank=RANK).result()


def as_tinker(datum: Datum) -> Any:
    """A datum of the SDK."""
    from tinker import types

    arrays = {
        name: types.TensorData(
            data=array.tolist(), dtype="int64" if array.dtype.kind == "i" else "float32", shape=[len(array)]
        )
        for name, array in datum.loss_inputs.items()
        if name != "weights"  # which Tinker's policy losses do not take: a prompt's advantages are 0
    }
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens.tolist()), loss_fn_inputs=arrays)


def _datum(prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], index: int) -> Datum:
    """A sample of a group, in which every other one is good."""
    text = np.array([*prompt, *tokens])
    advantages = np.zeros(len(text) - 1, np.float32)
    advantages[len(prompt) - 1 :] = 1 if index % 2 else -1
    sampled = np.zeros(len(text) - 1, np.float32)
    sampled[len(prompt) - 1 :] = logprobs
    weights = (np.arange(len(text) - 1) >= len(prompt) - 1).astype(np.float32)
    inputs = {"target_tokens": text[1:], "weights": weights, "logprobs": sampled, "advantages": advantages}
    return Datum(tokens=text[:-1], loss_inputs=inputs)


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Runs calls in threads. Raises the first error of any."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main()
