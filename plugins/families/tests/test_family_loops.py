"""Tiny random models of each family: GRPO learns, both sides agree, and a killed run continues to the same end."""

import asyncio
import contextlib
import io
import multiprocessing
import shutil
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from pkgutil import resolve_name

import pytest
from safetensors.torch import load_file

from controller.loops import grpo
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder, complete_checkpoints
from controller.runs.metric_rows import is_timing
from generator.config import GeneratorConfig
from generator.engine_calls import Command, EngineCalls, Generate
from ownloop_doctors.mismatch import measure_parity
from ownloop_families.tiny import TINY_FAMILIES as MODELS
from ownloop_vision.image_prompts import FOLDER
from rl.system.hf_config import find_family, read_config
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.architectures import MODELS as CORE_MODELS
from tests.e2e.weight_meshes import PROMPTS
from tests.meshes_in_process import meshes_in_process, vllm_in_process
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig

pytestmark = pytest.mark.slow

FLOORS = {
    "gpt_oss torchtitan": 1e-5,
    "gpt_oss fsdp2": 1e-5,
    "deepseek_v3 torchtitan": 1e-5,
    "deepseek_v3 fsdp2": 1e-5,
    "glm4_moe torchtitan": 1e-5,
    "glm4_moe fsdp2": 1e-5,
    "gemma2 fsdp2": 1e-5,
    "gemma4 fsdp2": 1e-5,
    "olmo3 fsdp2": 1e-5,
    "seed_oss fsdp2": 1e-5,
    "smollm3 fsdp2": 1e-5,
    "qwen3_5 fsdp2": 5e-2,
    "qwen3_5 torchtitan": 5e-2,
    "qwen3_5_moe fsdp2": 1e-1,
    "qwen3_5_moe torchtitan": 1e-1,
}
"""Family and engine -> the most that trainer and generator may differ in a token's log-prob, in the mean of a step. In
float32, but for Qwen3.5, which vLLM serves in bfloat16 alone on a CPU. There mixtures choose other experts for some
tokens."""
STEP, EVAL = 4, 32
"""Prompts of a step, each with a group, and of an evaluation."""
IN_PROCESSES = ("olmo3", "seed_oss", "smollm3")
"""vLLM changes their classes."""


@pytest.mark.parametrize("name", FLOORS)
def test_a_family_learns_and_resumes(name: str, tmp_path: Path) -> None:
    if name.startswith("qwen3_5") and not FOLDER.is_dir():
        pytest.skip("vLLM's code of Qwen3.5 imports torchvision, which is not installed")
    # In a process of its own, because vLLM prepares for experts with the first engine of a process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
        own_process.submit(_check, name, tmp_path).result()


def _check(name: str, folder: Path) -> None:
    family, engine = name.split()
    model = {**CORE_MODELS, **MODELS}[family][1](folder / "model")
    settings = read_config(model)
    if (row := find_family(settings)) is not None and row.prepare_process:
        resolve_name(row.prepare_process)(settings["architectures"][0])
    dtype = "bfloat16" if family.startswith("qwen3_5") else "float32"
    config = GRPOConfig(
        model=str(model),
        env=EvenWords(),
        trainer=TrainerConfig(engine=engine, compute_dtype=dtype, max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype=dtype, max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8),
        num_steps=20,
        prompts_per_step=STEP,
        group_size=8,
        learning_rate=3e-3,
        num_eval=EVAL,
        checkpoint_every=8,
        keep_checkpoints=3,
    )
    logs = folder / "logs"
    with contextlib.ExitStack() as here:
        if family not in IN_PROCESSES:
            here.enter_context(vllm_in_process())
            here.enter_context(meshes_in_process())
        if dtype == "float32":
            both = (model, model)
            report = asyncio.run(measure_parity(both, config.trainer, config.generator, PROMPTS, config.sampling, logs))
            assert report.explanation.startswith("There is no mismatch to explain"), report.table()
        here.enter_context(_whole_bursts())
        rows = _train(config, folder / "whole")
        resumed = _train(config, _killed(folder / "whole", folder / "killed"), resume=True)
    evaluations = [row for row in rows if "eval_reward" in row]
    mismatches = [row["logprob_mismatch_mean"] for row in rows if "logprob_mismatch_mean" in row]
    print(name, [row["eval_reward"] for row in evaluations], f"{max(mismatches):.1e}", flush=True)
    assert evaluations[-1]["eval_reward"] > evaluations[0]["eval_reward_high"]
    assert max(mismatches) < FLOORS[name]
    differing = [(one, other) for one, other in zip(rows, resumed, strict=True) if one != other]
    assert differing == [], differing[0]
    weights = [load_file(folder / run / "model" / "model.safetensors") for run in ("whole", "killed")]
    assert all(weight.equal(weights[1][key]) for key, weight in weights[0].items())


@contextlib.contextmanager
def _whole_bursts() -> Generator[None]:
    """Within the block an engine that was idle waits for all requests of a step or of an evaluation.

    The last bits of a mixture's log-probs depend on which requests are computed together, so two runs are equal only
    if a slow machine does not divide them.
    """

    def await_burst(calls: EngineCalls, commands: list[Command]) -> None:
        while isinstance(last := commands[-1], Generate) and len(commands) < (STEP if last.num_samples > 1 else EVAL):
            commands.append(calls._commands.get(timeout=LIMIT_S))  # pyright: ignore[reportPrivateUsage]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCalls, "_await_burst", await_burst)
        yield


def _train(config: GRPOConfig, path: Path, *, resume: bool = False) -> list[dict[str, float]]:
    """Runs GRPO, and returns the metrics, timings aside."""
    folder = RunFolder(path, config, resume=resume)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    return [{key: value for key, value in row.items() if not is_timing(key)} for row in folder.metrics()]


def _killed(whole: Path, copy: Path) -> Path:
    """A run as it would be left if it were killed after its last step, with its first checkpoint alone."""
    shutil.copytree(whole, copy)
    (copy / "finished.json").unlink()
    shutil.rmtree(copy / "model")
    for checkpoint in complete_checkpoints(copy / "checkpoints")[1:]:
        shutil.rmtree(checkpoint)
    return copy
