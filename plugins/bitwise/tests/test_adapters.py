"""Adapters: of several in one batch, the trainer's log-probs are the generator's; gradients are torchtitan's."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generator.config import LoRALimits
from generator.engine import GenerationEngine
from plugins.bitwise.tests.test_generator import KINDS, Sampled, data, make, num_different, prompts
from rl.lora import LoRAConfig, Policy
from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams
from tests.generator.engines import EngineFactory
from tests.stores import FakeStore
from tests.trainer.adapters import randomize
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

CONFIGS = {
    "whole": LoRAConfig(rank=8, alpha=12.0),
    "odd": LoRAConfig(rank=3, alpha=2.0, train_mlp=False),
    "inner": LoRAConfig(rank=4, alpha=4.0, train_unembed=False),
}


async def _sample(engine: GenerationEngine) -> dict[Policy, Sampled]:
    """Samples of every prompt under every policy, all at once."""
    keys = [
        (policy, prompt, replace(KINDS[i % len(KINDS)], seed=i))
        for i, prompt in enumerate(prompts())
        for policy in (None, *CONFIGS)
    ]
    groups = await asyncio.gather(*(engine.generate(p, kind, 2, policy=policy) for policy, p, kind in keys))
    found: dict[Policy, Sampled] = {}
    for (policy, prompt, kind), group in zip(keys, groups, strict=True):
        found.setdefault(policy, []).extend((prompt, kind, each) for each in group)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("exaone4", "gemma2", "gemma3", "qwen2", "qwen3"))],
)
def test_log_probs_of_several_adapters_in_one_batch_are_the_trainers(
    family: str, dtype: Any, tmp_path: Path, build_engine: EngineFactory
) -> None:
    """Two of the three adapters have a place in a step, so that they change places too."""
    model = make(tmp_path, family, dtype, tie_word_embeddings=family != "qwen2")
    room = LoRALimits(max_rank=8, max_adapters=2, max_loaded=4)
    engine = build_engine(model, dtype, numerics="bitwise", max_model_len=200, max_num_seqs=24, lora=room)
    base = load_engine(TrainerConfig(model=model, engine="bitwise", compute_dtype=dtype, lora=LoRAConfig(rank=8)))
    # vLLM has no layer for the output projection of a Gemma 2.
    configs = {
        name: replace(each, train_unembed=False) if family == "gemma2" else each for name, each in CONFIGS.items()
    }
    adapters = {name: randomize(base.adapter(name, config), i) for i, (name, config) in enumerate(configs.items())}
    store = FakeStore()
    publishers = {
        name: WeightPublisher(getattr(torch, dtype), policy=name, lora=config, store=store)
        for name, config in configs.items()
    }

    async def main() -> None:
        for version in range(2):
            for name, adapter in adapters.items():
                record = await publishers[name].publish(version, adapter.hf_parameters())
                assert record is not None
                await engine.update_weights(record, store)
            for policy, sampled in (await _sample(engine)).items():
                batch = data(sampled)
                trainer = base if policy is None else adapters[str(policy)]
                assert num_different(batch, trainer.forward([batch]).logprobs) == 0
                if policy is not None:
                    output = trainer.forward_backward([batch[::2]], get_loss("importance_sampling", {}))
                    assert num_different(batch[::2], output.logprobs) == 0
                    trainer.optim_step(AdamParams(learning_rate=1e-2))

    asyncio.run(main())


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_of_an_adapter_are_those_of_torchtitan(name: str, tmp_path: Path) -> None:
    model, batch = make(tmp_path, "qwen3", "float32"), random_batch((1, 17, 40, 5))
    found: list[tuple[np.ndarray[Any, Any], dict[str, torch.Tensor]]] = []
    for engine in ("bitwise", "torchtitan"):
        lora = CONFIGS[name]
        base = load_engine(TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=lora))
        adapter = randomize(base.adapter("a", lora))
        output = adapter.forward_backward([batch], get_loss("cross_entropy"))
        grads = {key: parameter.grad for key, parameter in adapter.hf_parameters() if parameter.grad is not None}
        found.append((np.concatenate(output.logprobs), grads))
    (ours, our_grads), (theirs, their_grads) = found
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert our_grads.keys() == their_grads.keys()
    assert len(our_grads) >= 2 * 2 * 4
    for key, grad in our_grads.items():
        torch.testing.assert_close(grad, their_grads[key], rtol=1e-3, atol=2e-4 * float(grad.abs().max()))
