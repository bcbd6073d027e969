"""A generator as GPUs get it, on a pretended GPU: vLLM's V2 runner with asynchronous scheduling, FlashAttention, sleep.

    python -m tests.gpu_pretended.generator

Another process pushes weights over CUDA IPC, as a trainer does. What is sampled is scored by transformers on the CPU
with the weights of its version. vLLM's Triton kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), its others in
`vllm_kernels.py`. Prints one JSON object: the largest mean difference of log-probs in each situation, and what should
be 0. Exits with 1 if one is too large.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from generator.config import GeneratorConfig
from generator.options import generator_env
from rl.tiny_models import tiny_qwen3
from rl.types import Completion, SamplingParams
from rl.weights.versions import VersionRecord
from trainer.engines.contract.reference import LocalStore
from trainer.push import WeightPublisher

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SPREADS = (0.1, 0.15, 0.2)
"""Of the weights of each version."""
LIMIT = 0.03
"""Of bfloat16 and a model this small: a wrong version, or a lost key, differs by more than 0.3."""


def push(pipe: "Connection[Any, Any]", models: Sequence[Path]) -> None:
    """The trainer's process: publishes a model when it is asked for its version, and keeps the memory until the end."""
    publisher = WeightPublisher(torch.bfloat16, "gpu_memory", store=LocalStore())
    while (version := pipe.recv()) is not None:
        weights = {name: tensor.cuda() for name, tensor in load_file(models[version] / "model.safetensors").items()}
        pipe.send(asyncio.run(publisher.publish(version, weights.items())))


class Scores:
    """What transformers computes with the weights of each version."""

    def __init__(self, models: Sequence[Path]) -> None:
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models]

    def difference(self, completion: Completion) -> float:
        """Mean absolute difference of log-probs. Keys of older versions stay, so tokens of one version are compared."""
        tokens = torch.tensor([[*PROMPT, *completion.tokens]])
        version = completion.versions[0]
        num_compared = completion.versions.count(version)
        with torch.no_grad():
            logprobs = self._models[version](tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, len(PROMPT) :, None])[:num_compared, 0]
        return float((expected - torch.tensor(completion.logprobs[:num_compared])).abs().mean())


async def rehearse(engine: Any, pipe: "Connection[Any, Any]", scores: Scores) -> Mapping[str, float]:
    """The situations, one after the other."""
    found: dict[str, float] = {}

    async def sampled(num_tokens: int = 12, num_samples: int = 2) -> list[Completion]:
        return await engine.generate(
            PROMPT, SamplingParams(max_tokens=num_tokens, seed=1, ignore_eos=True), num_samples
        )

    def pushed(version: int) -> VersionRecord:
        pipe.send(version)
        return pipe.recv()

    async def compared(name: str, version: int) -> None:
        completions = await sampled()
        found[f"versions_wrong_{name}"] = sum(set(each.versions) != {version} for each in completions)
        found[name] = max(map(scores.difference, completions))

    await compared("as_loaded", 0)
    record = pushed(1)
    running = asyncio.create_task(sampled(60, 4))
    while not engine.num_unfinished:
        await asyncio.sleep(0.01)
    await engine.update_weights(record, LocalStore(), mode="inflight")
    across = await running
    found["in_flight"] = max(map(scores.difference, across))
    found["not_across_versions"] = sum(set(each.versions) != {0, 1} for each in across)
    await compared("after_a_pull_in_flight", 1)

    record, running = pushed(2), asyncio.create_task(sampled(30, 4))
    aborted = asyncio.create_task(sampled(100, 1))
    while engine.num_unfinished < 5:
        await asyncio.sleep(0.01)
    aborted.cancel()
    await engine.update_weights(record, LocalStore(), mode="drain")
    found["not_drained"] = sum(set(each.versions) != {1} for each in await running)
    found["left_by_an_abort"] = engine.num_unfinished
    await compared("after_a_drain", 2)

    await engine.rest(asleep=True)
    record = pushed(1)
    await engine.rest(asleep=False)
    await engine.update_weights(record, LocalStore())
    await compared("after_sleep_and_a_pull", 1)
    return found


def main() -> int:
    """Starts both processes."""
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {"hidden_size": 128, "head_dim": 64}
        models = [
            tiny_qwen3(Path(folder) / str(spread), tied=False, initializer_range=spread, **shape) for spread in SPREADS
        ]
        config = GeneratorConfig(
            model=models[0],
            max_model_len=128,
            max_num_seqs=16,
            placement="colocated",
            engine_args={"enforce_eager": True, "gpu_memory_utilization": 0.3},
        )
        os.environ.update(generator_env(config))
        from vllm.distributed.device_communicators import cuda_wrapper

        from generator.engine import GenerationEngine

        # vLLM's sleep looks for the real runtime by its path, and would pass the preloaded one by.
        cuda_wrapper.find_loaded_library = lambda _: os.environ["LD_PRELOAD"]
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        trainer = context.Process(target=push, args=(theirs, models), daemon=True)
        trainer.start()
        engine = GenerationEngine(config)
        about = engine.llm.vllm_config
        found = dict(asyncio.run(rehearse(engine, pipe, Scores(models))))
        found |= {
            "not_v2": float(not about.use_v2_model_runner),
            "not_async": float(not about.scheduler_config.async_scheduling),
        }
        pipe.send(None)
        trainer.join()
        engine.close()
    print(json.dumps(found))
    return int(any(value > (LIMIT if value % 1 else 0) for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
