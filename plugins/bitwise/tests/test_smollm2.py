"""SmolLM2 in processes of its own: a thousand completions of mixed batches, with pushes in between, differ nowhere."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.launching.launcher import launch
from controller.runs.models import resolve_model
from generator.config import GeneratorConfig
from plugins.bitwise.tests.test_generator import data, num_different
from rl.system.hf_config import read_config
from rl.types import AdamParams, SamplingParams
from trainer.config import TrainerConfig

pytestmark = pytest.mark.slow

KINDS = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=7, temperature=0.7),
    SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9),
    SamplingParams(max_tokens=12, top_k=40),
    SamplingParams(max_tokens=1),
)
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 64, 100, 129, 200, 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousand_completions_differ_nowhere(dtype: Any, tmp_path: Path) -> None:
    model, random = resolve_model("smollm2-135m-instruct"), np.random.default_rng(0)
    words = read_config(model)["vocab_size"]
    prompts = [random.integers(3, words, n).tolist() for n in LENGTHS]
    prompts += [[*prompts[9][:60], *prompts[3]], [*prompts[11][:150], 5, 6]]  # they begin as others do
    trainer = TrainerConfig(engine="bitwise", compute_dtype=dtype, num_threads=1, max_tokens_per_microbatch=1024)
    generator = GeneratorConfig(
        numerics="bitwise", dtype=dtype, num_threads=2, max_model_len=384, max_num_seqs=64, kept_sets=True
    )

    async def main() -> None:
        async with launch(model, trainer, generator, tmp_path) as (train, generate):
            for version in range(3):
                requests = [(p, replace(kind, seed=100 * version + i)) for i, p in enumerate(prompts) for kind in KINDS]

                async def late(i: int, prompt: list[int], kind: SamplingParams) -> Any:
                    await asyncio.sleep(0.05 * (i % 7))  # requests join while others decode
                    return await generate.generate(prompt, kind, 3 + i % 4)

                groups = await asyncio.gather(*(late(i, *request) for i, request in enumerate(requests)))
                batch = data([(p, s, c) for (p, s), group in zip(requests, groups, strict=True) for c in group])
                assert len(batch) > 333
                assert num_different(batch[::3], (await train.forward(batch[::3])).logprobs) == 0
                output = await train.forward_backward(batch, "importance_sampling")
                assert num_different(batch, output.logprobs) == 0
                await train.optim_step(AdamParams(learning_rate=1e-4), 1 / len(batch))
                await generate.pull_model_state_dict(await train.push_model_state_dict())

    asyncio.run(main())
