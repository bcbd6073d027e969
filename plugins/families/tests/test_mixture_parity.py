"""Trainer and generator of a mixture of experts: in a file of its own, because vLLM has a group for experts only if the
first engine of a process has experts.
"""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from controller.loops import grpo
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.recording import read_recording
from generator.config import GeneratorConfig
from ownloop_doctors.mismatch import measure_parity
from rl.tiny_models import SERVABLE, tiny_qwen3_moe
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.e2e.weight_meshes import PROMPTS
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]
SHAPE: dict[str, Any] = {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {**SERVABLE, **SHAPE, "moe_intermediate_size": 64}
    return tiny_qwen3_moe(tmp_path_factory.mktemp("mixture") / "model", **shape)


@pytest.mark.slow
def test_a_run_replays_the_experts_of_its_generator(model: Path, tmp_path: Path) -> None:
    mismatches: dict[str, float] = {}
    for routes in ("off", "replay"):
        config = GRPOConfig(
            model=str(model),
            env=EvenWords(),
            trainer=TrainerConfig(),
            generator=GeneratorConfig(max_model_len=64, max_num_seqs=16),
            sampling=SamplingParams(max_tokens=16, top_p=0.9),
            routes=routes,  # pyright: ignore[reportArgumentType]
            num_steps=2,
            prompts_per_step=4,
            group_size=4,
            num_eval=8,
            learning_rate=1e-3,
        )
        folder = RunFolder(tmp_path / routes, config)
        asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
        first = next(row for row in folder.metrics() if "grad_norm" in row)
        mismatches[routes] = first["logprob_mismatch_mean"]
        groups = read_recording(tmp_path / routes / "rollouts")[1]
        recorded = [turn.completion.routes for g in groups for r in g.rollouts for turn in r.turns]
        assert all((each is not None) == (routes == "replay") for each in recorded)
    assert mismatches["replay"] < 0.6 * mismatches["off"]


@pytest.mark.slow
def test_the_experts_and_the_head_of_a_mixture_are_named(model: Path, tmp_path: Path) -> None:
    generator, sampling = GeneratorConfig(max_model_len=128, max_num_seqs=8), SamplingParams(max_tokens=16)
    both = (model, model)
    report = asyncio.run(measure_parity(both, TrainerConfig(), generator, PROMPTS, sampling, tmp_path / "logs"))
    names = [mismatch.name for mismatch in report.mismatches]
    assert names[1] == "- with the generator's experts"
    assert names[-2:] == ["- and a float32 head on both sides", "- and float32 on both sides"]
    configured, replayed = report.mismatches[:2]
    assert replayed.mean < 0.5 * configured.mean
    assert report.mismatches[-1].mean < 1e-4
    assert "% by the experts: the trainer's layers choose others" in report.explanation
    assert report.vocabulary.startswith("All 64 words at 4 positions: the KL divergence of the trainer's distribution")
    assert report.vocabulary in report.table()
