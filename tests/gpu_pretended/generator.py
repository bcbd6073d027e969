"""A generator as GPUs get it, on a pretended GPU: vLLM's V2 runner with asynchronous scheduling, FlashAttention, sleep.

    python -m tests.gpu_pretended.generator [RANKS]

Another process pushes weights over CUDA IPC, as a trainer does. What is sampled is scored by transformers on the CPU
with the weights of its version. vLLM's Triton kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), its others in
`vllm_kernels.py`. Each of two ranks has half of every layer on a GPU of its own. Prints one JSON object: the largest
mean difference of log-probs in each situation, and what should be 0. Exits with 1 if one is too large.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from generator.config import GeneratorConfig
from generator.options import generator_env
from rl.lora import LoRAConfig
from rl.tiny_models import tiny_qwen3, tiny_qwen3_moe
from rl.types import Completion, SamplingParams
from rl.weights.version import VersionRecord
from trainer.engines.contract.reference import LocalStore
from trainer.push import WeightPublisher

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SPREADS = (0.1, 0.15, 0.2)
"""Of the weights of each version."""
LIMIT = 0.05
"""Of bfloat16 and a model this small: a wrong version, or a lost key, differs by more than 0.3."""


class Trainer:
    """Another process, which publishes what it is asked to, and keeps the memory until the end."""

    def __init__(self, lora: LoRAConfig | None = None) -> None:
        """Starts it. `lora` is of all adapters."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_publish, args=(theirs, lora), daemon=True)
        self._process.start()

    def push(self, version: int, weights: Path, policy: str | None = None) -> VersionRecord:
        """Publishes a file of tensors as a version of the model or of an adapter."""
        self._pipe.send((version, weights, policy))
        return self._pipe.recv()

    def end(self) -> None:
        """Ends the process."""
        self._pipe.send(None)
        self._process.join()


def _publish(pipe: "Connection[Any, Any]", lora: LoRAConfig | None) -> None:
    publishers: dict[str | None, WeightPublisher] = {}
    while (asked := pipe.recv()) is not None:
        version, path, policy = asked
        if policy not in publishers:
            of_policy = None if policy is None else lora
            publishers[policy] = WeightPublisher(
                torch.bfloat16, "gpu_memory", policy=policy, lora=of_policy, store=LocalStore()
            )
        weights = {name: tensor.cuda() for name, tensor in load_file(path).items()}
        pipe.send(asyncio.run(publishers[policy].publish(version, weights.items())))


def difference(models: Mapping[int, Any], prompt: Sequence[int], completion: Completion) -> float:
    """Mean absolute difference of a completion's log-probs from those of transformers' models of its versions.

    Where the distribution was cut, they are those among the words that are said to be kept.
    """
    tokens = torch.tensor([[*prompt, *completion.tokens]])
    with torch.no_grad():
        logits = {
            version: models[version](tokens).logits[0, len(prompt) - 1 : -1] for version in {*completion.versions}
        }
    of_versions = torch.stack([logits[version][i] for i, version in enumerate(completion.versions)])
    if (kept := completion.kept) is not None:
        for i, row in enumerate(of_versions):
            if kept.counts[i]:  # none stands for all
                cut = torch.ones(len(row), dtype=torch.bool)
                cut[kept.part(i, i + 1).ids.tolist()] = False
                row[cut] = -torch.inf
    expected = of_versions.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().mean())


async def rehearse(engine: Any, trainer: Trainer, models: Sequence[Path]) -> Mapping[str, float]:
    """The situations, one after the other."""
    found: dict[str, float] = {}
    expected = {version: AutoModelForCausalLM.from_pretrained(path) for version, path in enumerate(models)}

    async def sampled(num_tokens: int = 12, num_samples: int = 2, **options: Any) -> list[Completion]:
        sampling = SamplingParams(max_tokens=num_tokens, seed=1, ignore_eos=True, **options)
        return await engine.generate(PROMPT, sampling, num_samples)

    def pushed(version: int) -> VersionRecord:
        return trainer.push(version, models[version] / "model.safetensors")

    def compare(name: str, completions: Sequence[Completion], *versions: int) -> None:
        found[f"versions_wrong_{name}"] = sum({*each.versions} != {*versions} for each in completions)
        found[name] = max(difference(expected, PROMPT, each) for each in completions)

    compare("as_loaded", await sampled(), 0)
    compare("cut", cut := await sampled(top_p=0.7), 0)
    found["not_cut"] = sum(each.kept is None or not each.kept.counts.any() for each in cut)
    record, running = pushed(1), asyncio.create_task(sampled(60, 4))
    while not engine.num_unfinished:
        await asyncio.sleep(0.01)
    await engine.update_weights(record, LocalStore(), mode="inflight")
    compare("in_flight", await running, 0, 1)
    compare("after_a_pull_in_flight", await sampled(), 1)

    record, running = pushed(2), asyncio.create_task(sampled(30, 4))
    aborted = asyncio.create_task(sampled(100, 1))
    while engine.num_unfinished < 5:
        await asyncio.sleep(0.01)
    aborted.cancel()
    await engine.update_weights(record, LocalStore(), mode="drain")
    compare("drained", await running, 1)
    found["left_by_an_abort"] = engine.num_unfinished
    compare("after_a_drain", await sampled(), 2)

    await engine.sleep()
    record = pushed(1)
    await engine.wake_up()
    await engine.update_weights(record, LocalStore())
    compare("after_sleep_and_a_pull", await sampled(), 1)
    return found


def tiny_models(folder: str, *, mixture: bool = False) -> Sequence[Path]:
    """A model for each version, which differ much."""
    shape: dict[str, Any] = {"hidden_size": 128, "head_dim": 64}
    make = partial(tiny_qwen3_moe, moe_intermediate_size=64) if mixture else partial(tiny_qwen3, tied=False)
    return [make(Path(folder) / str(x), initializer_range=x, **shape) for x in SPREADS]


def start(model: Path, **options: Any) -> Any:
    """An engine in this process."""
    config = GeneratorConfig(
        model=model,
        max_model_len=128,
        max_num_seqs=16,
        placement="colocated",
        engine_args={"enforce_eager": True, "gpu_memory_utilization": 0.3, "disable_custom_all_reduce": True},
        **options,
    )
    os.environ.update(generator_env(config))
    from generator.engine import GenerationEngine

    return GenerationEngine(config)


def tell(found: Mapping[str, float]) -> int:
    """Prints what was found. Returns 1 if a difference is too large, or a number is not 0."""
    print(json.dumps(found))
    return int(not all(value <= (LIMIT if value % 1 else 0) for value in found.values()))


def _follow(rank: int, model: Path, options: Mapping[str, Any]) -> None:
    """The engine of another rank, which takes the first one's steps until that closes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    start(model, **options).close()  # with the first


def main(num_ranks: str = "1") -> int:
    """Starts all processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        models, trainer = tiny_models(folder), Trainer()
        options: dict[str, Any] = {"kept_sets": True}
        if num_ranks != "1":
            options["tensor_parallel"] = int(num_ranks)
            ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": num_ranks}
            os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        free.close()
        others = [context.Process(target=_follow, args=(i, models[0], options)) for i in range(1, int(num_ranks))]
        for other in others:
            other.start()
        engine = start(models[0], **options)
        about = engine.llm.vllm_config
        found = dict(asyncio.run(rehearse(engine, trainer, models)))
        found |= {
            "not_v2": float(not about.use_v2_model_runner),
            "not_async": float(not about.scheduler_config.async_scheduling),
        }
        trainer.end()
        engine.close()
        for other in others:
            other.join()
    return tell(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
