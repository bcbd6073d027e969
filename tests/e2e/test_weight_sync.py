"""Weights from sharded ranks through TorchStore into vLLM, all in real processes."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.handles.generator_handle import GeneratorHandle
from controller.processes.errors import MeshError
from controller.processes.mesh import Mesh
from rl.types import Completion, SamplingParams
from rl.weights.version import UnknownVersionError, WeightsError, WeightsMismatchError
from tests.e2e.publisher_actor import perturbed
from tests.e2e.weight_meshes import (
    PROMPTS,
    export,
    greedy,
    publish,
    renew,
    running_generator,
    running_publisher,
    running_store,
    working,
)
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.e2e


@pytest.mark.slow
async def test_what_cannot_be_pulled_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    directory, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"

    async with running_store(logs) as store, running_generator(directory, "float32", logs, store) as generator:
        with pytest.raises(UnknownVersionError, match="nothing was pushed yet"):
            await generator.pull_model_state_dict(1)
        async with running_publisher(store, directory, "float32", "shared_memory", logs, num_ranks=1) as publisher:
            for version in (1, 2, 3):
                await publish(publisher, version, seed=version)
            await generator.pull_model_state_dict(2)
            reference = await greedy(generator)
            with pytest.raises(UnknownVersionError, match="version 1 cannot be pulled; versions that can: 2, 3"):
                await generator.pull_model_state_dict(1)
            await renew(publisher, "bfloat16", "shared_memory")
            await publish(publisher, 4, seed=4)
            with pytest.raises(WeightsMismatchError, match=r"published as torch\.bfloat16.*holds torch\.float32"):
                await generator.pull_model_state_dict(4)
            await renew(publisher, "float32", "shared_memory")
            await publish(publisher, 5, seed=5, drop=("model.norm.weight",))
            with pytest.raises(WeightsMismatchError, match=r"missing: model\.norm\.weight"):
                await generator.pull_model_state_dict(5)
            await renew(publisher, "float32", "shared_memory")
            await publish(publisher, 6, seed=6)
            os.kill(publisher.pids[0], signal.SIGKILL)
            with pytest.raises(MeshError):
                await publish(publisher, 7, seed=7)
            with pytest.raises(WeightsError, match="which is gone; they have to be pushed again"):
                await generator.pull_model_state_dict(6)
        async with running_publisher(store, directory, "float32", "auto", logs, num_ranks=1) as publisher:
            await publish(publisher, 8, seed=8)
            os.kill(store.mesh.pids[0], signal.SIGKILL)
            with pytest.raises(WeightsError, match="version 9 was not published: TorchStore failed"):
                await publish(publisher, 9, seed=9)
            with pytest.raises(WeightsError, match="TorchStore did not say which versions there are"):
                await generator.pull_model_state_dict(8)
        assert await generator.version() == 2
        assert await greedy(generator) == reference


@pytest.mark.slow
async def test_two_tensor_parallel_ranks_sample_as_the_model(tmp_path: Path) -> None:
    directory, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    exported = export(directory, perturbed(directory, 2), "float32", tmp_path / "exported")
    reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    transports = (("shared_memory", 2), ("torchstore", 4))

    async with (
        running_store(logs) as store,
        running_generator(directory, "float32", logs, store, tensor_parallel=2) as generator,
    ):
        names = [name for pid in generator.mesh.pids for name in _shared_memory_of(pid)]
        assert names
        assert all(name.endswith("(deleted)") for name in names)  # so nothing is left, however the ranks end
        async with running_publisher(store, directory, "float32", "auto", logs) as publisher:
            for transport, version in transports:
                await renew(publisher, "float32", transport)
                await publish(publisher, version, seed=2)
                await generator.pull_model_state_dict(version)
                completions = await greedy(generator)
                for prompt, completion in zip(PROMPTS, completions, strict=True):
                    assert_greedy(reference, prompt, completion)
                assert {v for c in completions for v in c.versions} == {version}
            with pytest.raises(UnknownVersionError):
                await generator.pull_model_state_dict(1)
            await renew(publisher, "float32", "shared_memory")
            await publish(publisher, 6, seed=2)
            long = SamplingParams(max_tokens=90, temperature=0)
            running = [asyncio.create_task(generator.generate(PROMPTS[0], long)) for _ in range(50)]
            await working(generator)
            await generator.pull_model_state_dict(6, mode="inflight")
            completions = [completion for (completion,) in await asyncio.gather(*running)]
            assert all(list(completion.versions) == sorted(completion.versions) for completion in completions)
            updated = [completion for completion in completions if set(completion.versions) == {4, 6}]
            assert_greedy(reference, PROMPTS[0], updated[0])
            await _without_shared_memory(publisher, generator, reference)
        unseeded = SamplingParams(max_tokens=8)
        together = [generator.generate(PROMPTS[0], unseeded, 3) for _ in range(6)]
        assert [len(samples) for samples in await asyncio.gather(*together)] == [3] * 6
        os.kill(generator.mesh.pids[1], signal.SIGKILL)
        with pytest.raises(MeshError, match=r"generator: rank 1 \(process \d+\) died"):
            await asyncio.wait_for(generator.generate(PROMPTS[0], unseeded), LIMIT_S)


async def _without_shared_memory(publisher: Mesh, generator: GeneratorHandle, reference: Any) -> None:
    """TorchStore carries the weights then, with one warning, unless shared memory was asked for by name."""
    await publisher.call("limit_shared_memory", [()] * publisher.num_ranks)
    await renew(publisher, "float32", "auto")
    for version, seed in ((8, 8), (9, 2)):
        await publish(publisher, version, seed)
        await generator.pull_model_state_dict(version)
    warning = r"TorchStore carries the weights.*: weights need \d+\.\d MB of shared memory.*\(File too large\)"
    assert len(re.findall(warning, "".join(f.read_text() for f in publisher.processes.log_files))) == 1
    completions = await greedy(generator)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert_greedy(reference, prompt, completion)
    assert {v for c in completions for v in c.versions} == {9}
    await renew(publisher, "float32", "shared_memory")
    with pytest.raises(WeightsError, match=r"need .* MB of shared memory.*weight_transport='torchstore'"):
        await publish(publisher, 10, seed=7)


def _shared_memory_of(pid: int) -> list[str]:
    """What a process has mapped for vLLM's groups."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "cpushm_" in line]


def assert_greedy(reference: Any, prompt: list[int], completion: Completion) -> None:
    """The tokens are the most probable ones, with their log-probs."""
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
    assert completion.tokens == tuple(logits.argmax(-1).tolist())
    chosen = logits.log_softmax(-1)[range(len(completion.tokens)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)
