"""Weights of a mixture between the processes of a trainer and of a tensor-parallel generator."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.publisher_actor import perturbed
from tests.e2e.test_weight_sync import assert_greedy
from tests.e2e.weight_meshes import (
    PROMPTS,
    export,
    greedy,
    publish,
    running_generator,
    running_publisher,
    running_store,
)
from tests.generator.served_models import served_qwen3_moe

pytestmark = pytest.mark.e2e


@pytest.mark.slow
async def test_experts_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    directory, logs = served_qwen3_moe(tmp_path / "model"), tmp_path / "logs"

    async with (
        running_store(logs) as store,
        running_generator(directory, "float32", logs, store, tensor_parallel=2) as generator,
        running_publisher(store, directory, "float32", "shared_memory", logs) as publisher,
    ):
        for version in (1, 2, 3):
            await publish(publisher, version, seed=version)
            await generator.pull_model_state_dict(version)
        exported = export(directory, perturbed(directory, 3), "float32", tmp_path / "exported")
        reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        for prompt, completion in zip(PROMPTS, await greedy(generator), strict=True):
            assert_greedy(reference, prompt, completion)
