"""A run with images is killed and continues as if it had been left alone; it is replayed; two ranks serve one model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from controller.commands.recipes import runnable_configuration
from controller.runs.folder import complete_checkpoints
from ownloop_doctors.mismatch import recipe_parity
from ownloop_vision.image_prompts import FOLDER
from plugins.vision.tests.vision import WITH_IMAGES, WORDS, image_datum, parts
from rl.rollouts.rendering import Renderer
from rl.types import SamplingParams
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait
from tests.e2e.publisher_actor import perturbed
from tests.e2e.weight_meshes import export, publish, running_generator, running_publisher, running_store
from tests.waiting import wait_for_end
from trainer.config import TrainerConfig
from trainer.engines import load_engine

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="torchvision for the CPU is not installed"),
]
RECIPE = str(Path(__file__).with_name("tiny_images.py"))


def finish(tmp_path: Path, *arguments: str) -> None:
    status, output, _ = wait_for_end(ownloop(tmp_path, *arguments), "the run", 400)
    assert status == 0, output


def versions(run: Path) -> list[float]:
    return [row["policy_version"] for row in metric_rows(run) if "policy_version" in row]


@pytest.mark.parametrize(
    "options",
    [(), ("--trainer.no-train-vision",), ("--lora.rank", "4")],
    ids=["whole", "frozen_tower", "adapter"],
)
def test_a_killed_run_continues_and_is_replayed(tmp_path: Path, options: Sequence[str]) -> None:
    """Of a model that is trained with its vision tower or below a frozen one, and of an adapter of both.

    The last bits of an adapter's log-probs depend on which requests share a step of vLLM, so its runs are equal but for
    rounding (docs/resume.md).
    """
    finish(tmp_path, RECIPE, "--name", "whole", *options)
    whole, killed, replayed = (tmp_path / "runs" / name for name in ("whole", "killed", "replayed"))
    run = ownloop(tmp_path, RECIPE, "--name", "killed", *options)
    wait(run, lambda: complete_checkpoints(killed / "checkpoints"))
    kill_controller(run, killed, 3)
    finish(tmp_path, "--resume", "killed")
    is_rounded = "--lora.rank" in options
    for row, expected in zip(metric_rows(killed), metric_rows(whole), strict=True):
        assert row == pytest.approx(expected, rel=1e-3 * is_rounded, abs=1e-6 * is_rounded)
    assert versions(whole) == [1, 2, 3, 4, 5]
    mismatches = [row["logprob_mismatch_mean"] for row in metric_rows(whole) if "logprob_mismatch_mean" in row]
    assert len(mismatches) == 5
    assert max(mismatches) < 1e-4
    finish(tmp_path, RECIPE, "--name", "replayed", "--replay", str(whole), *options)
    assert model_hash(whole) == model_hash(replayed)
    assert model_hash(whole) == model_hash(killed) or is_rounded


@pytest.mark.parametrize("options", [(), ("--lora.rank", "4")])
def test_parity_compares_prompts_with_images(options: Sequence[str]) -> None:
    report = asyncio.run(recipe_parity(runnable_configuration(RECIPE, options, "parity"), print))
    assert max(row.mean for row in (*report.mismatches, report.stepped)) < 1e-4
    assert report.sides[-1].mean > 1e-3  # the optimizer step, which both sides made
    assert "There is no mismatch to explain" in report.explanation
    assert "KL divergence" in report.vocabulary


@pytest.mark.parametrize("name", WITH_IMAGES)
async def test_two_tensor_parallel_ranks_read_images(tmp_path: Path, name: str) -> None:
    """Two ranks push, each a shard of every weight, and two pull; log-probs are a trainer's of the same weights."""
    model, logs = WITH_IMAGES[name](tmp_path / "model", WORDS), tmp_path / "logs"
    exported = export(model, perturbed(model, 3), "float32", tmp_path / "exported")
    pictures = [((64, 64),), ((96, 32), (32, 32)), ((128, 64),)]
    prompts = [Renderer(model).encode(parts("what", *each, "colour")) for each in pictures]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    async with (
        running_store(logs) as store,
        running_generator(model, "float32", logs, store, tensor_parallel=2) as generator,
        running_publisher(store, model, "float32", "shared_memory", logs) as publisher,
    ):
        for version in (1, 2, 3):
            await publish(publisher, version, seed=version)
            await generator.pull_model_state_dict(version)
        samples = [sample for each in prompts for sample in await generator.generate(each, greedy)]
    trainer = load_engine(TrainerConfig(model=exported, engine="fsdp2", compute_dtype="float32"))
    data = [image_datum(prompt, sample.tokens) for prompt, sample in zip(prompts, samples, strict=True)]
    for prompt, sample, found in zip(prompts, samples, trainer.forward([data]).logprobs, strict=True):
        assert np.abs(found[len(prompt) - 1 :] - sample.logprobs).max() < 1e-4
