"""A trainer whose experts or layers lie on several ranks, and a generator that takes its weights, in one run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig
from rl.losses import get_loss
from rl.protocols import Generator, Trainer
from rl.tiny_models import random_batch
from rl.types import AdamParams, Completion, Datum
from tests.e2e.weight_meshes import GREEDY, PROMPTS
from tests.generator.served_models import served_qwen3
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error

pytestmark = pytest.mark.e2e

# With an epsilon far above the gradient, the first step is a tenth of the gradient: what differs is not blown up.
LINEAR_STEP = AdamParams(learning_rate=1e3, eps=1e4)
SCALE = 0.1
BATCH = random_batch(LENGTHS)


@pytest.mark.slow
def test_pipeline_stages_train_as_one_rank_does(tmp_path: Path) -> None:
    model = served_qwen3(tmp_path / "model", tied=False)
    assert_trains_as_one_rank_and_is_sampled(model, {"pipeline_parallel": 2}, tmp_path)


def assert_trains_as_one_rank_and_is_sampled(model: Path, degrees: dict[str, Any], folder: Path) -> None:
    """A trainer of several ranks and a generator that takes its weights, beside an engine in this process."""
    options: dict[str, Any] = {"compute_dtype": "float32", "max_tokens_per_microbatch": 50}
    # A generator that is tensor-parallel, where the trainer is, takes shards that are cut along the same dimension.
    serving = GeneratorConfig(
        dtype="float32", max_model_len=128, max_num_seqs=8, tensor_parallel=degrees.get("tensor_parallel", 1)
    )

    async def main() -> None:
        async with Launcher(folder / "logs") as launcher:
            trainer, generator = await asyncio.gather(
                launcher.trainer(model, TrainerConfig(**options, **degrees), generator=serving),
                launcher.generator(model, serving),
            )
            first = await trainer.forward_backward(BATCH[:4], "cross_entropy")
            second = await trainer.forward_backward(BATCH[4:], "cross_entropy")
            await trainer.optim_step(LINEAR_STEP, SCALE)
            await trainer.export_hf(folder / "linear")
            _assert_like_one_rank(
                TrainerConfig(model=model, **options), [*first.logprobs, *second.logprobs], folder / "linear"
            )

            await _assert_generates_what_it_trained(trainer, generator, version=1)
            await trainer.forward_backward(BATCH, "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=1e-2))
            await trainer.export_hf(folder / "trained")
            sampled = await _assert_generates_what_it_trained(trainer, generator, version=2)
            fresh = await launcher.generator(folder / "trained", serving, name="fresh")
            expected = await _greedy(fresh)
            assert [c.tokens for c in sampled] == [c.tokens for c in expected]
            assert [c.logprobs for c in sampled] == [c.logprobs for c in expected]

    asyncio.run(main())


def _assert_like_one_rank(config: TrainerConfig, logprobs: Sequence[np.ndarray], exported: Path) -> None:
    """The same two calls and the same step in one engine in this process."""
    engine, restored = load_engine(config), list[np.ndarray]()
    start = {name: p.detach().clone() for name, p in engine.hf_parameters()}
    for batch in (BATCH[:4], BATCH[4:]):
        cut = plan(config, batch)
        output = engine.forward_backward(cut.split(batch)[0], get_loss("cross_entropy"))
        restored += cut.restore([output.logprobs])
    for ours, expected in zip(logprobs, restored, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    engine.optim_step(LINEAR_STEP, SCALE)
    parameters = load_file(exported / "model.safetensors")
    moved = {name: p.detach() - start[name] for name, p in engine.hf_parameters()}
    assert parameters.keys() == moved.keys()
    assert min(float(change.abs().max()) for change in moved.values()) > 1e-3
    errors = {name: relative_error(parameters[name] - start[name], change) for name, change in moved.items()}
    assert max(errors.values()) < 1e-4, errors


async def _assert_generates_what_it_trained(trainer: Trainer, generator: Generator, version: int) -> list[Completion]:
    """After a push and a pull the trainer has the log-probs of the tokens that the generator samples."""
    before = await _greedy(generator)
    assert await trainer.push_model_state_dict() == version
    await generator.pull_model_state_dict(version)
    after = await _greedy(generator)
    assert {v for c in after for v in c.versions} == {version}
    data = [_datum(prompt, completion) for prompt, completion in zip(PROMPTS, after, strict=True)]
    scored = (await trainer.forward(data)).logprobs
    gaps = [np.abs(p[-len(c.logprobs) :] - c.logprobs).max() for p, c in zip(scored, after, strict=True)]
    assert max(gaps) < 1e-4
    moved = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(after, before, strict=True)]
    assert min(moved) > 10 * max(gaps)  # those are not the weights that it had
    return after


def _datum(prompt: list[int], completion: Completion) -> Datum:
    tokens = np.array([*prompt, *completion.tokens])
    return Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:]})


async def _greedy(generator: Generator) -> list[Completion]:
    """One after the other: how requests fall into batches changes the last bits of a log-prob."""
    return [(await generator.generate(prompt, GREEDY))[0] for prompt in PROMPTS]
